"""What the decoding benchmark measures: for each section of its page a function that yields the rows of its table."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from statistics import median
from typing import NamedTuple

import decoders
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from side_by_side import ratio, ratios, shown, side_by_side
from torch import Tensor, nn

import recurrent_depth as rd
from recurrent_depth.speculation import speculate

DTYPES = (torch.float32, torch.bfloat16)
HF, DENSE, GRT = "Hugging Face GPT-2", "dense 12", "GRT `1+1×10+1`"
X_TRANSFORMERS = "x-transformers, looped `0+3×4+0`"
COMPILED = (DENSE, GRT, "dense", "looped")


class Scale(NamedTuple):
    """How large everything is, and how often it is measured."""

    rounds: int
    compiled: tuple[int, ...]
    shrink: int = 1
    vocab: int = 50304
    prompts: tuple[int, int] = (256, 1024)
    long: int = 4096
    new: int = 16
    batches: tuple[int, int] = (1, 8)
    many: tuple[int, int] = (32, 64)

    def sizes(self, dim: int = 768, num_heads: int = 12) -> dict[str, int]:
        """The arguments of a builder."""
        context = max(*self.prompts, self.long) + self.new
        return {
            "dim": dim // self.shrink, "num_heads": num_heads, "vocab_size": self.vocab, "context_length": context,
        }  # fmt: skip

    def text(self, length: int) -> tuple[Tensor, Tensor]:
        """A prompt of one row, and tokens that go on behind it."""
        prompt, new = torch.randint(self.vocab, (1, length + self.new)).split([length, self.new], dim=1)
        return prompt, new


def short(dtype: torch.dtype) -> str:
    """Its name."""
    return str(dtype)[6:]


def rates(scale: Scale) -> Iterator[str]:
    """How fast weights are read by products with one row, by how many of them are read in turn."""
    for dtype in DTYPES:
        cells = []
        for megabytes in (4, 8, 16, 24, 48, 96):
            num_rows = megabytes * 2**20 // (8 * 768 * dtype.itemsize)
            weights, x = [torch.randn(num_rows, 768).to(dtype) for _ in range(8)], torch.randn(1, 768).to(dtype)
            times = side_by_side({"read": lambda w=weights, x=x: [F.linear(x, weight) for weight in w]}, 9)["read"]
            cells.append(f"{megabytes * 2**20 / median(times) / 1e9:.0f}")
        yield f"| {short(dtype)} | {' | '.join(cells)} |"


def grt(scale: Scale) -> rd.RecurrentTransformer:
    """The Gated Recurrent Transformer of 12 executed blocks."""
    return rd.grt(rd.Layout(1, 1, 10, 1), **scale.sizes()).eval()


def both_ways(
    model: rd.RecurrentTransformer, cache: rd.DepthCache, new: Tensor, name: str, scale: Scale
) -> dict[str, decoders.Run]:
    """The runs of a model as it is, and compiled where it is one of a goal, of a batch that was asked for."""
    runs = {name: decoders.ours(model, cache, new)}
    if cache.batch in scale.compiled and name in COMPILED:
        runs[f"{name}, compiled"] = decoders.ours(decoders.compiled(model), cache, new)
    return runs


def cells(times: dict[str, list[float]], name: str, to: str) -> str:
    """The ratios of a model, as it is and compiled."""
    return " | ".join(ratio(times, of, to) if of in times else "" for of in (name, f"{name}, compiled"))


def latency(scale: Scale) -> Iterator[str]:
    """Every model beside Hugging Face's."""
    for dtype in DTYPES:
        sizes = scale.sizes()
        native = {
            DENSE: (rd.dense(12, **sizes), rd.KeepAll()),
            "naive `0+3×4+0`": (rd.naive(rd.Layout(0, 3, 4, 0), **sizes), rd.KeepAll()),
            GRT: ((gated := grt(scale)), rd.KeepAll()),
            f"{GRT}, `KeepMean`": (gated, rd.KeepMean()),
        }
        peers = (decoders.hugging_face_model(**sizes), decoders.x_transformers_model(**sizes))
        for model in (*peers, *(model for model, _ in native.values())):
            model.to(dtype).eval()
        for prompt in scale.prompts:
            for batch in scale.batches:
                yield from latency_rows(peers, native, dtype, prompt, batch, scale)


def latency_rows(
    peers: tuple[nn.Module, nn.Module], native: dict, dtype: torch.dtype, length: int, batch: int, scale: Scale
) -> Iterator[str]:
    """One setting: a row for each model."""
    torch.compiler.reset()
    prompt, new = scale.text(length)
    runs = {HF: decoders.hugging_face(peers[0], prompt, new, batch)}
    if batch == 1:
        runs[X_TRANSFORMERS] = decoders.x_transformers(peers[1], prompt, new)
    for name, (model, kv) in native.items():
        runs |= both_ways(model, decoders.filled(model, prompt, scale.new, kv, batch), new, name, scale)
    times = side_by_side(runs, scale.rounds)
    setting = f"| {short(dtype)} | {batch} | {length:,}"
    yield f"{setting} | {HF} | {1000 * median(times[HF]) / scale.new:.1f} ms | | | | |"
    for name, (model, kv) in native.items():
        goal = "at most 0.70, better 0.60" if (name, dtype, batch) == (GRT, torch.bfloat16, 1) else ""
        expected = f"{expected_flops(model, native[DENSE][0], length):.3f}"
        moved = [decoders.bytes_from_memory(of, length, batch, dtype, by) for of, by in ((model, kv), native[DENSE])]
        yield f"{setting} | {name} | {cells(times, name, HF)} | {expected} | {moved[0] / moved[1]:.3f} | {goal} |"
    if batch == 1:
        yield f"{setting} | {X_TRANSFORMERS} | {ratio(times, X_TRANSFORMERS, HF)} | | | | |"


def expected_flops(model: rd.RecurrentTransformer, other: rd.RecurrentTransformer, context: int) -> float:
    """The ratio of a token's FLOPs."""
    return decoders.token_flops(model, context) / decoders.token_flops(other, context)


def depth(scale: Scale) -> Iterator[str]:
    """Looped models beside dense ones of as many executed blocks."""
    cases = (
        (640, 10, rd.Layout(1, 1, 10, 1), torch.float32, 0.90),
        (512, 8, rd.Layout(2, 5, 4, 2), torch.float32, 1.10),
        (512, 8, rd.Layout(2, 5, 4, 2), torch.bfloat16, 0.95),
    )
    length = scale.prompts[0]
    for dim, heads, layout, dtype, goal in cases:
        torch.compiler.reset()
        prompt, new = scale.text(length)
        dense = rd.dense(layout.executed, **scale.sizes(dim, heads)).to(dtype).eval()
        looped = rd.grt(layout, **scale.sizes(dim, heads)).to(dtype).eval()
        runs = {}
        for name, model in (("dense", dense), ("looped", looped)):
            runs |= both_ways(model, decoders.filled(model, prompt, scale.new), new, name, scale)
        times = side_by_side(runs, scale.rounds)
        faster = ratio(times, "looped, compiled", "dense, compiled") if 1 in scale.compiled else ""
        moved = [decoders.bytes_from_memory(of, length, 1, dtype, rd.KeepAll()) for of in (looped, dense)]
        yield (
            f"| `{layout}` / dense {layout.executed} | {dim} | {short(dtype)} | "
            f"{1000 * median(times['dense']) / scale.new:.1f} ms | {ratio(times, 'looped', 'dense')} | {faster} | "
            f"{expected_flops(looped, dense, length):.3f} | {moved[0] / moved[1]:.3f} | at most {goal:.2f} |"
        )


def memory(scale: Scale) -> Iterator[str]:
    """Live bytes of a prompt and the tokens behind it, beside the accountant's figure."""
    for batch, dtype in zip(scale.batches, DTYPES, strict=True):
        gated, full = grt(scale).to(dtype), 0
        dense = rd.dense(12, **scale.sizes()).to(dtype).eval()
        for name, model, kv in ((DENSE, dense, rd.KeepAll()), (GRT, gated, rd.KeepAll()), (GRT, gated, rd.KeepMean())):
            peak, cache = measured_memory(model, kv, batch, scale)
            expected = rd.accounting.decode_memory(
                model, cache.capacity, batch=batch, prompt=scale.prompts[0], dtype=dtype, kv=kv
            ).total
            core = sum(buffer.nbytes for key, slot in cache.slots.items() if key.part == "core" for buffer in slot.both)
            full = core if isinstance(kv, rd.KeepAll) else full
            yield (
                f"| {name}, `{type(kv).__name__}` | {short(dtype)} | {batch} | {peak / 2**20:,.1f} MiB | "
                f"{expected / 2**20:,.1f} MiB | {peak / expected:.4f} | {Fraction(core, full)} |"
            )


@torch.no_grad()
def measured_memory(
    model: rd.RecurrentTransformer, kv: rd.KVStepPolicy, batch: int, scale: Scale
) -> tuple[int, rd.DepthCache]:
    """The most bytes that were alive, weights included, and the cache in the end."""
    prompt, new = (tokens.expand(batch, -1).clone() for tokens in scale.text(scale.prompts[0]))
    cache = rd.DepthCache(kv, max_tokens=prompt.shape[1] + scale.new)
    with LiveBytes() as live:
        rd.extend(model, prompt, cache, logits_to_keep=1)
        for token in new.split(1, dim=1):
            rd.extend(model, token, cache)
    return sum(weight.nbytes for weight in model.parameters()) + live.peak, cache


def leaving(scale: Scale) -> Iterator[str]:
    """What leaving early saves, in a batch."""
    length, (some, many) = scale.prompts[0], scale.many
    model = grt(scale)
    spread = [1 + row * model.num_steps // many for row in reversed(range(many))]
    prompt, new = scale.text(length)
    new = new[:, : max(scale.new // 4, 1)]
    half = model.num_steps // 2
    for dtype in DTYPES:
        cache = decoders.filled(model.to(dtype), prompt, scale.new, batch=some)
        runs = {
            "full": decoders.ours(model, cache, new),
            f"`num_steps={half}`": decoders.ours(model, cache, new, half),
            f"exit rule `ExitAfter({half})`": decoders.ours_until(model, cache, new, rd.ExitAfter(half)),
        }
        yield from gains(runs, f"{short(dtype)} | {some}", promised(model, length, [half]), "0.92 of it", scale)
    cache = decoders.filled(model.float(), prompt, scale.new, batch=many)
    runs = {"full": decoders.ours(model, cache, new), "a depth per row": decoders.ours(model, cache, new, spread)}
    yield from gains(runs, f"float32 | {many}", promised(model, length, spread), "1.25", scale)


def promised(model: rd.RecurrentTransformer, context: int, depths: list[int]) -> float:
    """How many times the throughput executed FLOPs promise."""
    spent = sum(decoders.token_flops(model, context, num_steps) for num_steps in depths)
    return len(depths) * decoders.token_flops(model, context) / spent


def gains(runs: dict[str, decoders.Run], setting: str, promise: float, goal: str, scale: Scale) -> Iterator[str]:
    """A row for each run beside the first."""
    times = side_by_side(runs, scale.rounds)
    for name in list(runs)[1:]:
        gain = ratios(times, "full", name)
        yield f"| {name} | {setting} | {shown(gain)} | {promise:.3f} | {median(gain) / promise:.3f} | at least {goal} |"


def context(scale: Scale) -> Iterator[str]:
    """A token far behind beside a token near the beginning."""
    model, lengths = grt(scale), (scale.prompts[0], scale.long)
    for dtype in DTYPES:
        for kv in (rd.KeepAll(), rd.KeepMean()):
            runs = {}
            for length in lengths:
                prompt, new = scale.text(length)
                runs[str(length)] = decoders.ours(model, decoders.filled(model.to(dtype), prompt, scale.new, kv), new)
            times = side_by_side(runs, scale.rounds)
            flops = [decoders.token_flops(model, length) for length in lengths]
            moved = [decoders.bytes_read(model, length, 1, dtype) for length in lengths]
            expected = [flops[1] / flops[0], moved[1] / moved[0]]
            yield (
                f"| {short(dtype)} | `{type(kv).__name__}` | {ratio(times, *map(str, reversed(lengths)))} | "
                f"{expected[0]:.3f} | {expected[1]:.3f} | at most {max(expected):.3f} |"
            )


def speculation(scale: Scale) -> Iterator[str]:
    """Drafts of the first half of the steps, beside plain generation of the same tokens."""
    model, (prompt, _) = grt(scale), scale.text(scale.prompts[0] // 4)
    asked = {"max_new_tokens": 2 * scale.new}
    for dtype in DTYPES:
        model.to(dtype)
        for draft_steps in (model.num_steps // 5, model.num_steps // 2):
            drafted = {**asked, "draft_steps": draft_steps}
            runs: dict[str, Callable[[], object]] = {
                "generate": lambda: rd.generate(model, prompt, **asked),
                "speculate": lambda drafted=drafted: speculate(model, prompt, **drafted),
            }
            gain = ratios(side_by_side(runs, scale.rounds), "generate", "speculate")
            accepted = speculate(model, prompt, **drafted).acceptance_rate
            yield f"| {short(dtype)} | {draft_steps} | {accepted:.2f} | {shown(gain)} |"
