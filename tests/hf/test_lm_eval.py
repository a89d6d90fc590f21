"""lm-evaluation-harness on native models and grafts, with a task and a model that lie in a folder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hosts
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from recurrent_depth.hf import RecurrentDepthConfig, RecurrentDepthForCausalLM, load_graft

# The harness is no requirement of the quick tests, and its own and its dependencies' warnings are no errors of ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORDS = [f"w{index}" for index in range(3, hosts.VOCAB)]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def text(length: int, seed: int) -> str:
    drawn = torch.randint(len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in drawn.tolist())


DOCUMENTS = [
    {"question": text(3 + 2 * i, i), "choices": [text(1 + i, 10 + i), text(5 - i % 3, 20 + i)], "gold": i % 2}
    for i in range(5)
]


@pytest.fixture(scope="module")
def harness(installed: Callable[[str, str], Path]) -> Any:
    """The harness, where it is installed."""
    installed("lm_eval", "-c constraints.txt -e '.[eval]'")
    from recurrent_depth.hf import harness

    return harness


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A native model and a graft, each with a tokenizer."""
    words = {word: index for index, word in enumerate(["<pad>", "<bos>", "<eos>", *WORDS])}
    built = Tokenizer(WordLevel(words, unk_token="<pad>"))
    built.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": hosts.VOCAB, "max_position_embeddings": 64}
    native = RecurrentDepthConfig(layout=[1, 1, 3, 1], initializer_range=0.3, **sizes)
    # Plain from_pretrained reads the host of the second, and nothing of the third.
    models = {"native": RecurrentDepthForCausalLM(native), "graft": hosts.grafted("llama")}
    models["graft_without_a_layer"] = hosts.grafted("llama", drop=[4])
    found = {}
    for name, model in models.items():
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of multiple choice and its documents."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "documents.json").write_text(json.dumps(DOCUMENTS))
    (folder / "local_choice.yaml").write_text(TASK.format(documents=folder / "documents.json"))
    return folder


def open_model(harness: Any, folder: Path, **arguments: Any) -> Any:
    return harness.RecurrentLM(str(folder), device="cpu", dtype="float32", **arguments)


def pairs() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        for choice in document["choices"]:
            yield document["question"], f" {choice}"


def requests() -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs())]


def by_hand(folder: Path, num_steps: int) -> list[float]:
    """Log-likelihoods of the choices, one after the other, by the model alone."""
    load = load_graft if folder.name.startswith("graft") else RecurrentDepthForCausalLM.from_pretrained
    model, found = load(folder).eval(), []
    names = {word: index for index, word in enumerate(WORDS, start=3)}
    for question, choice in pairs():
        context, answer = ([names[word] for word in part.split()] for part in (question, choice))
        with torch.no_grad():
            said: Tensor = model(torch.tensor([context + answer]), num_steps=num_steps).logits[0].log_softmax(-1)
        found.append(sum(float(said[len(context) + i - 1, token]) for i, token in enumerate(answer)))
    return found


each_model = pytest.mark.parametrize("name", ["native", "graft", "graft_without_a_layer"])


@each_model
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_log_likelihoods_are_those_of_the_model_whatever_the_batch(harness, folders, name, num_steps):
    expected = by_hand(folders[name], num_steps)
    for batch_size in (1, 4, 5):
        model = open_model(harness, folders[name], num_steps=num_steps, batch_size=batch_size)
        found = [value for value, _ in model.loglikelihood(requests(), disable_tqdm=True)]
        assert found == pytest.approx(expected, abs=1e-5)


@each_model
def test_depth_is_the_models_own_where_none_is_asked_for(harness, folders, name):
    model = open_model(harness, folders[name])
    assert model.num_steps == model.get_model_info()["num_steps"] == 3
    found = [value for value, _ in model.loglikelihood(requests(), disable_tqdm=True)]
    assert found == pytest.approx(by_hand(folders[name], 3), abs=1e-5)
    assert found != pytest.approx(by_hand(folders[name], 1), abs=1e-2)


@each_model
@pytest.mark.parametrize("batch_size", [1, 4])
def test_text_is_what_generate_writes_at_that_depth(harness, folders, name, batch_size):
    from lm_eval.api.instance import Instance

    model = open_model(harness, folders[name], num_steps=2, batch_size=batch_size)
    settings = {"until": ["never"], "max_gen_toks": 5}
    asked = [
        Instance("generate_until", {}, (document["question"], settings), i) for i, document in enumerate(DOCUMENTS)
    ]
    found = model.generate_until(asked, disable_tqdm=True)
    for document, said in zip(DOCUMENTS, found, strict=True):
        prompt = model.tokenizer(document["question"], return_tensors="pt", add_special_tokens=False)
        whole = model.model.generate(**prompt, max_new_tokens=5, do_sample=False, num_steps=2)[0]
        written = model.tokenizer.decode(whole[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert said.split() == written.split()


@each_model
def test_the_depth_stands_in_the_results(harness, folders, task, name):
    import lm_eval
    from lm_eval.tasks import TaskManager

    found: Any = lm_eval.simple_evaluate(
        open_model(harness, folders[name], num_steps=2),
        tasks=["local_choice"],
        task_manager=TaskManager(include_path=str(task)),
        bootstrap_iters=0,
    )
    assert found["config"]["num_steps"] == 2
    expected = torch.tensor(by_hand(folders[name], 2)).view(-1, 2).argmax(-1)
    right = expected == torch.tensor([document["gold"] for document in DOCUMENTS])
    assert found["results"]["local_choice"]["acc,none"] == pytest.approx(float(right.float().mean()))


def command(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """The launcher, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "recurrent_depth.hf.lm_eval", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache)},
    )


@pytest.mark.usefixtures("harness")
@each_model
def test_the_command_evaluates_a_folder(folders, task, tmp_path, name):
    said = f"--model_args pretrained={folders[name]},num_steps=2,dtype=float32 --tasks local_choice --device cpu"
    places = ["--include_path", str(task), "--output_path", str(tmp_path)]
    ran = command(*said.split(), *places, cache=tmp_path / "cache")
    assert ran.returncode == 0, ran.stderr
    assert "local_choice" in ran.stdout
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    assert results["config"]["model"] == "recurrent-depth"
    assert results["config"]["model_args"]["num_steps"] == 2
    assert results["config"]["num_steps"] == 2
    assert results["results"]["local_choice"]["sample_len"] == len(DOCUMENTS)


@pytest.mark.parametrize("num_steps", [0, -1, True])
def test_no_depth_is_refused(harness, folders, num_steps):
    with pytest.raises(ValueError, match="num_steps"):
        open_model(harness, folders["native"], num_steps=num_steps)


def test_a_model_without_a_loop_is_refused(harness, folders, tmp_path):
    hosts.host("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither a graft nor a model of this library"):
        open_model(harness, tmp_path, tokenizer=str(folders["native"]))


@pytest.mark.usefixtures("harness")
def test_the_commands_of_host_and_graft_can_be_compared(folders, task, tmp_path):
    found = {}
    for model, more in (("hf", ""), ("recurrent-depth", ",num_steps=1")):
        said = f"--model {model} --model_args pretrained={folders['graft']},dtype=float32{more} --tasks local_choice"
        out = tmp_path / model
        ran = command(*said.split(), "--include_path", str(task), "--output_path", str(out), cache=tmp_path / "cache")
        assert ran.returncode == 0, ran.stderr
        found[model] = json.loads(next(out.rglob("results_*.json")).read_text())["results"]["local_choice"]
    assert found["hf"] == found["recurrent-depth"]


@pytest.mark.usefixtures("harness")
@pytest.mark.parametrize(
    "given, said",
    [
        ("pretrained=nowhere", "error: pretrained is 'nowhere', but there is no such folder"),
        ("pretrained={graft},num_step=3", "error: num_step is no argument of the model; num_steps is."),
        ("pretrained={graft},num_steps=0", "error: num_steps is 0, but must be a whole number of at least 1."),
        ("pretrained={graft},nonsense=1", "error: The model's arguments cannot be right: "),
    ],
)
def test_a_wrong_value_is_said_in_a_line(folders, task, tmp_path, given, said):
    arguments = ["--model_args", given.format(**folders), "--tasks", "local_choice", "--include_path", str(task)]
    ran = command(*arguments, cache=tmp_path)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert said in ran.stderr.splitlines()[-1]


@pytest.mark.usefixtures("harness")
def test_the_commands_help_says_what_is_ours(tmp_path):
    said = command("--help", cache=tmp_path).stdout
    assert "num_steps" in said
    assert "usage: lm-eval" in said
