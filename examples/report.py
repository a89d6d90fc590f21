"""What came out of a run: figures on the terminal and in metrics.json, a plot, and a piece of text."""

import json
from typing import Any

import torch
from data import held_out_windows
from evaluation import evaluate, trigram_loss
from journal import read_journal
from models import has_gate
from plan import Job
from plots import plot
from sample import Arguments as SampleArguments
from sample import continuation, load_model, load_tokenizer

from recurrent_depth import accounting

MOST_WINDOWS = 512
PROMPT = "def "


def report(jobs: list[Job], device: torch.device) -> None:
    """Measures, unless that was done before; prints, and says where everything lies."""
    folder = jobs[0].arguments.run.out
    path, configs = folder / "metrics.json", {job.name: job.config for job in jobs}
    metrics = json.loads(path.read_text()) if path.exists() else {}
    if metrics.get("configs") == configs:
        print("\nThis run is finished; here is its report again.")
    else:
        print("\nMeasuring the losses at every depth ...", flush=True)
        metrics = {**measure(jobs, device), "configs": configs}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(metrics, indent=1))
        temporary.replace(path)
    plot(metrics, {job.name: read_journal(job.folder / "log.jsonl") for job in jobs}, folder / "plot.png")
    print(as_text(metrics))
    print(f"Plot:        {folder / 'plot.png'}\nFigures:     {path}")
    for job in jobs:
        print(f"Checkpoint:  {max(job.folder.glob('checkpoint-*'))}")


def measure(jobs: list[Job], device: torch.device) -> dict[str, Any]:
    """All figures of the report."""
    corpus, windows = jobs[0].corpus, held_out_windows(jobs[0].corpus, jobs[0].windows.shape[1], MOST_WINDOWS)
    return {
        "models": {job.name: _measure_model(job, windows, device) for job in jobs},
        "trigram_loss": trigram_loss(corpus.train, windows) if corpus.kind == "bytes" else None,
        "unit": f"nats per {corpus.unit.removesuffix('s')}",
        "text": {
            "source": corpus.source,
            "checksum": corpus.checksum,
            "num_train": corpus.train.size,
            "num_held_out": corpus.held_out.size,
            "num_measured": windows.numel(),
            "bytes_per_token": corpus.bytes_per_token,
        },
        "sample": None if corpus.kind == "ids" else _write(jobs[0], device),
    }


def _measure_model(job: Job, windows: torch.Tensor, device: torch.device) -> dict[str, Any]:
    model = load_model(job.folder)[0].to(device)
    taken = [record for record in read_journal(job.folder / "log.jsonl") if "loss" in record]
    bytes_per_token = job.corpus.bytes_per_token
    depths = range(1, model.layout.num_steps + 1)
    losses, gates = evaluate(model, windows, depths, job.arguments.recipe.batch_size)
    return {
        "layout": str(model.layout),
        "label": f"{job.name} {model.layout if model.layout.num_steps > 1 else f'{model.layout.stored} blocks'}",
        "parameters": accounting.num_parameters(model),
        "flops_per_token": accounting.flops_per_token(model, windows.shape[1]),
        "validation_loss": losses[-1],
        "loss_by_depth": losses,
        "depth_gain": losses[0] - losses[-1],
        "gates": gates if has_gate(model) else None,
        "validation_loss_per_byte": losses[-1] / bytes_per_token if bytes_per_token else None,
        "training_seconds": sum(record["seconds"] for record in taken),
    }


def _write(job: Job, device: torch.device) -> dict[str, str]:
    model, config = load_model(job.folder)
    tokenizer = load_tokenizer(job.folder, config)
    prompt = [int(token) for token in tokenizer.encode("prompt", PROMPT.encode())]
    written = continuation(model.to(device), prompt, SampleArguments(max_new_tokens=300))
    return {"model": job.name, "text": tokenizer.decode([*prompt, *written]).decode(errors="replace")}


def as_text(metrics: dict[str, Any]) -> str:
    """The report as a table."""
    unit, models = metrics["unit"], metrics["models"]
    rows = [
        ("", [model["label"] for model in models.values()]),
        ("parameters", [f"{model['parameters']:,}" for model in models.values()]),
        ("FLOPs per token, forward", [f"{model['flops_per_token'] / 1e6:,.2f} M" for model in models.values()]),
        ("training time", [f"{model['training_seconds']:,.0f} s" for model in models.values()]),
        (f"validation loss, {unit}", [f"{model['validation_loss']:.4f}" for model in models.values()]),
    ]
    if unit != "nats per byte" and metrics["text"]["bytes_per_token"]:
        rows.append(("  in nats per byte", [f"{model['validation_loss_per_byte']:.4f}" for model in models.values()]))
    text = "\n" + "\n".join(f"{label:<34}" + "".join(f"{cell:>18}" for cell in cells) for label, cells in rows)
    if metrics["trigram_loss"] is not None:
        text += f"\n{'a trigram count, same text':<34}{metrics['trigram_loss']:>18.4f}"
    text += "".join(_by_depth(name, model, unit) for name, model in models.items() if len(model["loss_by_depth"]) > 1)
    if metrics["sample"] is not None:
        text += f"\n\nWritten by {metrics['sample']['model']}, at full depth:\n" + _indented(metrics["sample"]["text"])
    return text + "\n"


def _by_depth(name: str, model: dict[str, Any], unit: str) -> str:
    losses, gates, gain = model["loss_by_depth"], model["gates"], model["depth_gain"]
    lines = [
        f"{name}, left after each step of the loop ({unit}):",
        "  step " + "".join(f"{step + 1:>8}" for step in range(len(losses))),
        "  loss " + "".join(f"{loss:>8.4f}" for loss in losses),
        f"  depth gain, the loss after step 1 less that after step {len(losses)}: {gain:.4f}",
    ]
    if gates is not None:
        lines.insert(3, "  gate " + "".join(f"{gate:>8.4f}" for gate in gates))
        lines.append("  gate: the mean share of the state that a step keeps; near 1, the loop is hardly used")
    return "\n\n" + "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
