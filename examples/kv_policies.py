"""What each KV policy costs a trained model: held-out loss by depth, and by position beyond the trained context.

    python examples/train.py && python examples/kv_policies.py

Every token is read alone, through the cache, as in decoding: the strictest case for a policy that shares copies.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
import tyro
from data import Corpus, batch, held_out_windows, standard_library, text, tokenize
from matplotlib.figure import Figure
from sample import load_model, load_tokenizer
from torch import Tensor
from tqdm import tqdm, trange

import recurrent_depth as rd


@dataclass(frozen=True)
class Arguments:
    """Measures what each KV policy costs a model that train.py trained."""

    run: Path = Path("runs/default/grt")
    """Folder of a model's checkpoints; the newest is used."""
    data: Path | None = None
    """The text it was trained on; by default Python's standard library."""
    out: Path = Path("runs/kv-policies")
    """Where table, plot and the losses by position go."""
    windows: int = 32
    """Held-out windows per loss."""
    stretch: int = 4
    """The longest text, as a multiple of the trained context; 1 for models with learned positions."""
    fit_steps: int = 60
    """Optimizer steps that fit KeepBlend."""
    chunk: int = 16
    """Tokens that are read at once while it is fitted."""


@torch.no_grad()
def losses(model: rd.RecurrentTransformer, windows: Tensor, policy: rd.KVStepPolicy, num_steps: int) -> Tensor:
    """Nats per token at each position, the mean over windows; every token is read alone."""
    cache, found = rd.DepthCache(policy, max_tokens=windows.shape[1]), []
    for place in trange(windows.shape[1] - 1, leave=False, desc=type(policy).__name__):
        logits = rd.extend(model, windows[:, place : place + 1], cache, num_steps)[:, -1]
        found.append(F.cross_entropy(logits.float(), windows[:, place + 1]))
    return torch.stack(found)


def fit_blend(model: rd.RecurrentTransformer, corpus: Corpus, arguments: Arguments, length: int) -> rd.KeepBlend:
    """A blend fitted on training text that is read in chunks; the model stays as it is."""
    model.requires_grad_(False)
    sizes = kv_sizes(model)
    blend = rd.KeepBlend(num_layers=model.layout.core, num_steps=model.num_steps, **sizes)
    optimizer = torch.optim.Adam(blend.parameters(), lr=0.05)
    for step in (bar := trange(arguments.fit_steps, leave=False, desc="fitting KeepBlend")):
        tokens = batch(corpus.train, step, seed=1, num_rows=4, length=length)
        cache = rd.DepthCache(blend)
        logits = torch.cat([rd.extend(model, chunk, cache) for chunk in tokens.split(arguments.chunk, dim=1)], dim=1)
        loss = rd.next_token_loss(logits, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss:.3f}")
    return blend


def kv_sizes(model: rd.RecurrentTransformer) -> dict[str, int]:
    """Heads and features of the core's keys and values, as a cache finds them."""
    cache = rd.DepthCache()
    with torch.no_grad():
        rd.extend(model, torch.zeros(1, 1, dtype=torch.long), cache, 1)
    _, num_kv_heads, _, head_size = next(slot.keys.shape for key, slot in cache.slots.items() if key.part == "core")
    return {"num_kv_heads": num_kv_heads, "head_size": head_size}


def policies(model: rd.RecurrentTransformer, blend: rd.KeepBlend) -> dict[str, rd.KVStepPolicy]:
    """The policies that are compared, by name."""
    cyclic = {f"KeepCyclic({n})": rd.KeepCyclic(n) for n in (2,) if n < model.num_steps}
    shared = {"KeepFirst": rd.KeepFirst(), "KeepLast": rd.KeepLast(), "KeepMean": rd.KeepMean()}
    return {"KeepAll": rd.KeepAll(), **cyclic, **shared, "KeepBlend": blend}


def table(by_depth: dict[str, dict[int, float]], copies: dict[str, int], unit: str) -> str:
    """Held-out loss of each policy at each depth."""
    depths = list(next(iter(by_depth.values())))
    head = "| policy | copies per core block | " + " | ".join(f"{d} step{'s' * (d > 1)}" for d in depths) + " |"
    rows = [
        f"| `{name}` | {copies[name]} | " + " | ".join(f"{losses[d]:.3f}" for d in depths) + " |"
        for name, losses in by_depth.items()
    ]
    return "\n".join([f"Held-out loss in {unit}:", "", head, "|---" * (len(depths) + 2) + "|", *rows])


def draw(by_position: dict[str, Tensor], trained: int, unit: str, path: Path) -> None:
    """The loss by position under KeepAll, and what each other policy adds to it, in bins, as a PNG."""
    size = max(1, trained // 4)
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name, found in by_position.items():
            exact = by_position["KeepAll"]
            axes, shown = (left, found) if name == "KeepAll" else (right, found - exact)
            bins = [float(part.mean()) for part in shown.split(size)]
            axes.plot([min(size * (i + 0.5), len(shown)) for i in range(len(bins))], bins, label=name, linewidth=2)
        for axes in (left, right):
            axes.axvline(trained, color="gray", linestyle=":", label="trained context")
            axes.set_xlabel("position")
            axes.legend(edgecolor="none")
        left.set(title="Every step kept", ylabel=f"held-out loss ({unit})")
        right.set(title="What sharing adds", ylabel=f"excess over KeepAll ({unit})")
        figure.savefig(path, dpi=120)


def main(arguments: Arguments) -> None:
    """Loads, fits, measures, prints and draws."""
    model, config = load_model(arguments.run)
    documents = standard_library() if arguments.data is None else text(arguments.data)
    corpus = tokenize(documents, load_tokenizer(arguments.run, config))
    trained, unit = config["data"]["window"], f"nats per {corpus.unit.removesuffix('s')}"
    short = held_out_windows(corpus, trained, arguments.windows)
    long = held_out_windows(corpus, trained * arguments.stretch, arguments.windows)
    compared = policies(model, fit_blend(model, corpus, arguments, trained))
    depths = sorted({1, *range(2, model.num_steps, 2), model.num_steps})
    by_depth = {
        name: {depth: float(losses(model, short, policy, depth).mean()) for depth in depths}
        for name, policy in tqdm(compared.items(), desc="by depth")
    }
    by_position = {
        name: losses(model, long, policy, model.num_steps)
        for name, policy in tqdm(compared.items(), desc="by position")
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    copies = {name: policy.num_copies(model.num_steps) for name, policy in compared.items()}
    written = table(by_depth, copies, unit)
    (arguments.out / "kv-policies.md").write_text(written + "\n")
    figures = {name: [round(float(x), 4) for x in found] for name, found in by_position.items()}
    (arguments.out / "kv-policies.json").write_text(json.dumps(figures))
    draw(by_position, trained, unit, arguments.out / "kv-policies.png")
    print(f"\n{written}\n\nTable and plot: {arguments.out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments))
    except ValueError as error:
        sys.exit(f"error: {error}")
