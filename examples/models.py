"""Which model the arguments ask for, as a description that a checkpoint can carry, and the model made from it."""

from functools import partial
from typing import Any

from arguments import DepthArguments, ModelArguments

import recurrent_depth as rd


def describe(name: str, arguments: ModelArguments, vocab_size: int) -> dict[str, Any]:
    """What `build` needs to make the model called `name`, in words and numbers.

    Raises:
        ValueError: if no plain loop stores and executes as many blocks as the layout.
    """
    layout = rd.Layout(*arguments.layout)
    sizes = {
        "form": arguments.form,
        "init_std": arguments.init_std,
        "dim": arguments.dim,
        "num_heads": arguments.num_heads,
        "vocab_size": vocab_size,
        "context_length": arguments.context_length,
    }
    if name == "dense":
        return {"builder": name, "num_blocks": layout.executed, **sizes}
    if name == "naive":
        return {"builder": name, "layout": list(_without_ends(layout)), **sizes}
    update = {"bias": arguments.gate_bias, "state_noise": arguments.state_noise, "gate_noise": arguments.gate_noise}
    return {"builder": name, "layout": list(layout), "update": update, **sizes}


def build(description: dict[str, Any]) -> rd.RecurrentTransformer:
    """The model of a description; its weights come from the global RNG."""
    arguments = dict(description)
    builder = BUILDERS[arguments.pop("builder")]
    if "form" not in arguments:
        return builder(**arguments)
    form, std = FORMS[arguments.pop("form")], arguments.pop("init_std")
    model = builder(form=form, **arguments)
    rd.initialise(model, std=std)
    return model


def sampler(model: rd.RecurrentTransformer, arguments: DepthArguments, seed: int) -> rd.DepthSampler:
    """How deep each training step goes. A model of one step has nothing to sample."""
    full, grad_steps = model.layout.num_steps, arguments.grad_steps
    if full == 1 or arguments.depth == "fixed":
        return rd.FixedDepth(full, grad_steps)
    if arguments.depth == "poisson":
        mean = full - 1 if arguments.mean_steps is None else arguments.mean_steps
        return rd.PoissonLogNormalDepth(mean=mean, grad_steps=grad_steps, seed=seed)
    return rd.UniformDepth(full, seed=seed, grad_steps=grad_steps)


def has_gate(model: rd.RecurrentTransformer) -> bool:
    """Whether the update has a gate that learns."""
    return any(name.startswith("core.update.gate.") for name, _ in model.named_parameters())


def _without_ends(layout: rd.Layout) -> rd.Layout:
    if layout.executed % layout.stored:
        raise ValueError(
            f"layout is {layout}: it executes {layout.executed} blocks, no multiple of the {layout.stored} that it "
            "stores, so that no plain loop equals it in both; choose another layout for --model naive."
        )
    return rd.Layout(0, layout.stored, layout.executed // layout.stored, 0)


def _grt(*, layout: list[int], update: dict[str, float], **sizes: Any) -> rd.RecurrentTransformer:
    return rd.grt(rd.Layout(*layout), update=partial(rd.gated, **update), **sizes)


def _naive(*, layout: list[int], **sizes: Any) -> rd.RecurrentTransformer:
    return rd.naive(rd.Layout(*layout), **sizes)


def _preset(*, name: str) -> rd.RecurrentTransformer:
    return getattr(rd.presets, name)()


# Another builder joins by one line here, and one in ModelArguments.model.
BUILDERS = {"grt": _grt, "dense": rd.dense, "naive": _naive, "preset": _preset}

FORMS = {"gpt2": rd.GPT2Form, "llama": rd.LlamaForm}
