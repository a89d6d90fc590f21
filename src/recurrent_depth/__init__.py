"""Recurrent-depth Transformers from composable parts."""

from recurrent_depth import accounting, presets
from recurrent_depth.attention import Attention, NoRotary, Rotary, causal_mask
from recurrent_depth.balance import Balance, BalanceBias, BalanceLoss
from recurrent_depth.behind import BehindLoop, NormEachStep
from recurrent_depth.blocks import MLP, Block, PlainBlock, Stack, SwiGLU, TransformerBlock
from recurrent_depth.borrowed import Borrowed
from recurrent_depth.builders import assemble, dense, gated, grt, naive, plain
from recurrent_depth.cache import DepthCache
from recurrent_depth.capacity import CosineCapacities, falling_capacities
from recurrent_depth.choice import Greedy, NextTokenRule, Sampling
from recurrent_depth.compiled_decoding import compile_decoding
from recurrent_depth.conditioned_block import ConditionedBlock
from recurrent_depth.consistency import WithConsistency, consistency_loss
from recurrent_depth.contracts import (
    At,
    BlockCost,
    Call,
    KeyValues,
    ModelKeyValues,
    Notes,
    PartCost,
    UpdateCost,
)
from recurrent_depth.convergence import ArgmaxStable, GateClosed, KLConverged, LatentConverged
from recurrent_depth.core import RecurrentCore
from recurrent_depth.curriculum import RampedDepth, linear_ramp, retrofit_curriculum, sqrt_ramp
from recurrent_depth.damped import DampedUpdate, damped
from recurrent_depth.decoding import Left, extend, extend_until
from recurrent_depth.dense_start import average_start, lower_start, relax, relaxed_stack, stepwise_start
from recurrent_depth.depth import Depth, Layout
from recurrent_depth.diagonal import DiagonalInjection, SquareMap
from recurrent_depth.distillation import DistilledLoss, Taught, aligned_state_loss, distillation_loss, taught
from recurrent_depth.embedding import (
    Embedding,
    Head,
    PositionedEmbedding,
    ScaledTable,
    TiedHead,
    TokenEmbedding,
    scaled_embedding,
)
from recurrent_depth.exit_objective import (
    ExitGainLoss,
    ExpectedExitLoss,
    SampledExitLoss,
    every_step_loss,
    exit_hazards,
)
from recurrent_depth.exits import AtLeast, ExitAfter, ExitRule, LearnedExit, exit_law
from recurrent_depth.factorised import FactorisedEmbedding, FactorisedHead
from recurrent_depth.forms import Form, GPT2Form, LlamaForm
from recurrent_depth.gate import AnchoredGate, DepthGate, JointNormGate, WriteShare
from recurrent_depth.generation import generate, stream
from recurrent_depth.halting import Halting, HaltingUpdate, TokenHalted
from recurrent_depth.halting_unit import HaltingUnit, blend_states, sum_states
from recurrent_depth.initialisation import initialise
from recurrent_depth.injection import AddAnchor, ConcatProjection, GaussianNoise, Injection, KeepState
from recurrent_depth.kv_policy import (
    KeepAll,
    KeepBlend,
    KeepCyclic,
    KeepFirst,
    KeepLast,
    KeepMean,
    KeysValues,
    KVStepPolicy,
    OneCopy,
)
from recurrent_depth.memory_slots import MemorySlotsUpdate, StepRouter
from recurrent_depth.model import RecurrentTransformer
from recurrent_depth.objective import WithObjective, last_step_loss, next_token_loss
from recurrent_depth.pick import Pick, pick_chosen, pick_fewest
from recurrent_depth.relatives import albert, huginn, ouro, parcae
from recurrent_depth.relaxation import RelaxedStack, StepCorrections
from recurrent_depth.residual import (
    BranchSandwich,
    PostNorm,
    PreNorm,
    Residual,
    ResidualProjection,
    ResidualSandwich,
)
from recurrent_depth.routed_relatives import every_other, expert_choice, mod, mor, token_choice
from recurrent_depth.router import Router, RouterState, Routing
from recurrent_depth.router_scores import LinearScores, MLPScores, RouterScores
from recurrent_depth.router_weights import (
    ConstantWeight,
    RawWeight,
    RouterWeight,
    SigmoidWeight,
    SoftmaxWeight,
    TanhWeight,
)
from recurrent_depth.routers import ExpertChoice, MixtureOfDepths
from recurrent_depth.routing import AddWeighted, Combination, Interpolate, RoutedUpdate
from recurrent_depth.row_sampling import PoissonDepthPerRow
from recurrent_depth.sampling import DepthSampler, ExpectedDepth, FixedDepth, PoissonLogNormalDepth, UniformDepth
from recurrent_depth.search import search_layouts
from recurrent_depth.skip import KeepAnchor, SkipUpdate
from recurrent_depth.speculation import Speculation, speculate
from recurrent_depth.start import RandomState
from recurrent_depth.step import StepBlocks
from recurrent_depth.step_embedding import AddStepEmbedding, StepEmbedding
from recurrent_depth.step_encoding import StepEncoding
from recurrent_depth.step_weight_relatives import ple, rrt
from recurrent_depth.stepwise_relatives import halted, loopformer, mesh, step_encoded, universal
from recurrent_depth.time_conditioning import CoarseTimes, TimeConditionedUpdate, TimeEmbedding
from recurrent_depth.token_choice import TokenChoice
from recurrent_depth.top_tokens import TopTokens
from recurrent_depth.trajectory import Trajectory
from recurrent_depth.trees import map_tensors
from recurrent_depth.universal_form import UniversalForm
from recurrent_depth.update import DepthState, DepthUpdate, GatedDepthUpdate, ReplaceState, initial_state
from recurrent_depth.weight_start import WeightStart, truncated_normal

__all__ = [
    "MLP",
    "AddAnchor",
    "AddStepEmbedding",
    "AddWeighted",
    "AnchoredGate",
    "ArgmaxStable",
    "At",
    "AtLeast",
    "Attention",
    "Balance",
    "BalanceBias",
    "BalanceLoss",
    "BehindLoop",
    "Block",
    "BlockCost",
    "Borrowed",
    "BranchSandwich",
    "Call",
    "CoarseTimes",
    "Combination",
    "ConcatProjection",
    "ConditionedBlock",
    "ConstantWeight",
    "CosineCapacities",
    "DampedUpdate",
    "Depth",
    "DepthCache",
    "DepthGate",
    "DepthSampler",
    "DepthState",
    "DepthUpdate",
    "DiagonalInjection",
    "DistilledLoss",
    "Embedding",
    "ExitAfter",
    "ExitGainLoss",
    "ExitRule",
    "ExpectedDepth",
    "ExpectedExitLoss",
    "ExpertChoice",
    "FactorisedEmbedding",
    "FactorisedHead",
    "FixedDepth",
    "Form",
    "GPT2Form",
    "GateClosed",
    "GatedDepthUpdate",
    "GaussianNoise",
    "Greedy",
    "Halting",
    "HaltingUnit",
    "HaltingUpdate",
    "Head",
    "Injection",
    "Interpolate",
    "JointNormGate",
    "KLConverged",
    "KVStepPolicy",
    "KeepAll",
    "KeepAnchor",
    "KeepBlend",
    "KeepCyclic",
    "KeepFirst",
    "KeepLast",
    "KeepMean",
    "KeepState",
    "KeyValues",
    "KeysValues",
    "LatentConverged",
    "Layout",
    "LearnedExit",
    "Left",
    "LinearScores",
    "LlamaForm",
    "MLPScores",
    "MemorySlotsUpdate",
    "MixtureOfDepths",
    "ModelKeyValues",
    "NextTokenRule",
    "NoRotary",
    "NormEachStep",
    "Notes",
    "OneCopy",
    "PartCost",
    "Pick",
    "PlainBlock",
    "PoissonDepthPerRow",
    "PoissonLogNormalDepth",
    "PositionedEmbedding",
    "PostNorm",
    "PreNorm",
    "RampedDepth",
    "RandomState",
    "RawWeight",
    "RecurrentCore",
    "RecurrentTransformer",
    "RelaxedStack",
    "ReplaceState",
    "Residual",
    "ResidualProjection",
    "ResidualSandwich",
    "Rotary",
    "RoutedUpdate",
    "Router",
    "RouterScores",
    "RouterState",
    "RouterWeight",
    "Routing",
    "SampledExitLoss",
    "Sampling",
    "ScaledTable",
    "SigmoidWeight",
    "SkipUpdate",
    "SoftmaxWeight",
    "Speculation",
    "SquareMap",
    "Stack",
    "StepBlocks",
    "StepCorrections",
    "StepEmbedding",
    "StepEncoding",
    "StepRouter",
    "SwiGLU",
    "TanhWeight",
    "Taught",
    "TiedHead",
    "TimeConditionedUpdate",
    "TimeEmbedding",
    "TokenChoice",
    "TokenEmbedding",
    "TokenHalted",
    "TopTokens",
    "Trajectory",
    "TransformerBlock",
    "UniformDepth",
    "UniversalForm",
    "UpdateCost",
    "WeightStart",
    "WithConsistency",
    "WithObjective",
    "WriteShare",
    "accounting",
    "albert",
    "aligned_state_loss",
    "assemble",
    "average_start",
    "blend_states",
    "causal_mask",
    "compile_decoding",
    "consistency_loss",
    "damped",
    "dense",
    "distillation_loss",
    "every_other",
    "every_step_loss",
    "exit_hazards",
    "exit_law",
    "expert_choice",
    "extend",
    "extend_until",
    "falling_capacities",
    "gated",
    "generate",
    "grt",
    "halted",
    "huginn",
    "initial_state",
    "initialise",
    "last_step_loss",
    "linear_ramp",
    "loopformer",
    "lower_start",
    "map_tensors",
    "mesh",
    "mod",
    "mor",
    "naive",
    "next_token_loss",
    "ouro",
    "parcae",
    "pick_chosen",
    "pick_fewest",
    "plain",
    "ple",
    "presets",
    "relax",
    "relaxed_stack",
    "retrofit_curriculum",
    "rrt",
    "scaled_embedding",
    "search_layouts",
    "speculate",
    "sqrt_ramp",
    "step_encoded",
    "stepwise_start",
    "stream",
    "sum_states",
    "taught",
    "token_choice",
    "truncated_normal",
    "universal",
]
