"""All methods of one folder in one table: their loss on the same held-out windows, and differences window by window."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

LABELS = {
    "graft": "graft, {steps}",
    "lora": "LoRA on the host",
    "adapter": "linear adapter, one pass",
}


class Row(NamedTuple):
    """One line: what was measured, and its loss in each window."""

    label: str
    method: str
    num_steps: int
    trained: bool
    losses: Tensor


def comparable(folder: Path) -> dict[str, dict[str, Any]]:
    """The summaries of the folder by method; the one written last says which text, host and tokens all must share."""
    paths = sorted(folder.glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    found = {path.parent.name: json.loads(path.read_text()) for path in paths}
    shared = [(s["config"]["data"], s["config"]["graft"]["host"], s["tokens"], s["host"]) for s in found.values()]
    kept = {name: found[name] for name, about in zip(found, shared, strict=True) if about == shared[-1]}
    return {name: kept[name] for name in LABELS if name in kept}


def rows(summaries: dict[str, dict[str, Any]]) -> list[Row]:
    """The host, what was made of it before the training, and after."""
    [first, *_] = summaries.values()
    found = [Row("host", "host", 1, False, _vector(first["host"]["1"]))]
    for trained, part in ((False, "before"), (True, "after")):
        for method, summary in summaries.items():
            for depth, losses in summary[part].items():
                steps = f"{depth} step{'s' * (depth != '1')}"
                label = f"{LABELS[method].format(steps=steps)}, {part}"
                found.append(Row(label, method, int(depth), trained, _vector(losses)))
    return found


def paired(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """The mean over windows of the difference, and its standard error."""
    difference = losses - others
    return difference.mean().item(), (difference.std() / len(difference) ** 0.5).item()


def as_markdown(summaries: dict[str, dict[str, Any]]) -> str:
    """The table, and below it what depth gains."""
    found = rows(summaries)
    host = found[0]
    head = "| | trained parameters | tokens | minutes | perplexity | loss | less the host's |"
    lines = [_line(row, host, summaries.get(row.method)) for row in found]
    about = next(iter(summaries.values()))
    measured = f"{len(host.losses)} held-out windows of {about['config']['data']['window']} tokens of {about['text']}"
    note = "Losses are in nats per token; differences are paired by window, ± one standard error."
    return "\n".join([f"{measured}. {note}", "", head, "|---" + "|---:" * 6 + "|", *lines, "", *gains(found)])


def gains(found: list[Row]) -> Iterator[str]:
    """The graft at each depth beyond one step against itself at one step and against the controls, after training."""
    after = [row for row in found if row.trained]
    deep = [row for row in after if row.method == "graft" and row.num_steps > 1]
    others = [row for row in after if row.method != "graft" or row.num_steps == 1]
    for row in deep:
        said = [f"{other.label.removesuffix(', after')} {_signed(row, other)}" for other in others]
        if said:
            yield f"- The graft at {row.num_steps} steps, less others after training: {'; '.join(said)}"


def as_json(summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every figure of the table."""
    found = rows(summaries)
    return {
        "rows": [
            {
                "label": row.label,
                "method": row.method,
                "num_steps": row.num_steps,
                "loss": row.losses.mean().item(),
                "perplexity": row.losses.mean().exp().item(),
                "less_the_host": paired(row.losses, found[0].losses),
                "losses": row.losses.tolist(),
            }
            for row in found
        ],
        "runs": {
            name: {k: v for k, v in s.items() if k not in ("host", "before", "after")} for name, s in summaries.items()
        },
    }


def _line(row: Row, host: Row, summary: dict[str, Any] | None) -> str:
    spent = ["", "", ""]
    if summary is not None and row.trained:
        minutes = f"{summary['seconds'] / 60:.0f}"
        spent = [f"{summary['trained_parameters']:,}", f"{summary['tokens']:,}", minutes]
    mean = row.losses.mean()
    difference = "" if row is host else _signed(row, host)
    return f"| {row.label} | " + " | ".join([*spent, f"{mean.exp():.2f}", f"{mean:.4f}", difference]) + " |"


def _signed(row: Row, other: Row) -> str:
    mean, error = paired(row.losses, other.losses)
    return f"{mean:+.4f} ± {error:.4f}"


def _vector(losses: list[float]) -> Tensor:
    return torch.tensor(losses, dtype=torch.float64)
