"""What one thread asks of a graft is nothing to another."""

import copy
import pickle
from threading import Barrier, Thread

import hosts
import pytest
import torch

import recurrent_depth as rd


def at_once(*works):
    """Runs functions in a thread each, and gives what they gave, or raises what they raised."""
    found, raised = {}, []

    def run(index, work):
        try:
            found[index] = work()
        except BaseException as error:
            raised.append(error)

    threads = [Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return [found[index] for index in range(len(works))]


@torch.no_grad()
def logits(model, tokens, **arguments):
    return model(tokens, **arguments).logits


@pytest.mark.parametrize("update", [None, rd.plain])
def test_threads_at_two_depths_get_their_own_results(update):
    model = hosts.grafted("llama", **({} if update is None else {"update": update}))
    tokens = [hosts.tokens(), hosts.tokens(3, 5)]
    expected = [logits(model, one, num_steps=n) for one, n in zip(tokens, (1, 3), strict=True)]

    def work(index):
        return [logits(model, tokens[index], num_steps=(1, 3)[index]) for _ in range(20)]

    for found, logit in zip(at_once(lambda: work(0), lambda: work(1)), expected, strict=True):
        assert all(torch.equal(one, logit) for one in found)


def test_forwards_that_meet_within_the_host_do_not_mix():
    """Both threads have noted their first layers when either runs its loop."""
    model = hosts.grafted("llama")
    tokens = [hosts.tokens(), hosts.tokens(3, 5)]
    expected = [logits(model, one, num_steps=n) for one, n in zip(tokens, (2, 2), strict=True)]
    barrier = Barrier(2, timeout=60)
    note = model.recurrence.note

    def noting(index, *call):
        calls = note(index, *call)
        barrier.wait()
        return calls

    model.recurrence.note = noting
    found = at_once(*(lambda one=one: logits(model, one, num_steps=2) for one in tokens))
    assert all(torch.equal(one, logit) for one, logit in zip(found, expected, strict=True))


def test_a_depth_that_one_thread_sets_is_not_anothers():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    expected = logits(model, tokens)
    with model.recurrence.at_depth(1):
        (found,) = at_once(lambda: logits(model, tokens))
        assert torch.equal(logits(model, tokens), logits(model, tokens, num_steps=1))
    assert torch.equal(found, expected)


def test_a_thread_may_generate_at_a_depth():
    model, prompt = hosts.grafted("llama"), hosts.padded()
    settings = {"max_new_tokens": 3, "do_sample": False}
    expected = [model.generate(**prompt, **settings, num_steps=n) for n in (1, 3)]
    found = at_once(*(lambda n=n: model.generate(**prompt, **settings, num_steps=n) for n in (1, 3)))
    assert all(torch.equal(one, text) for one, text in zip(found, expected, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_backward_pass_in_another_thread_recomputes_the_depth_of_its_forward(checkpointing):
    model, tokens = hosts.grafted("llama").train(), hosts.tokens()
    if checkpointing:
        model.recurrence.gradient_checkpointing = True

    def grads(backward):
        model.zero_grad()
        loss = model(tokens, labels=tokens, num_steps=2, use_cache=False).loss
        backward(loss)
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    def elsewhere(loss):
        def work():
            with model.recurrence.at_depth(1):
                loss.backward()

        with model.recurrence.at_depth(4):
            at_once(work)

    expected, found = grads(torch.Tensor.backward), grads(elsewhere)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_a_refused_call_of_one_thread_disturbs_no_other():
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    expected = logits(model, tokens)

    def refused():
        for _ in range(20):
            with pytest.raises(ValueError, match="num_steps"):
                model(tokens, num_steps=0)

    _, found = at_once(refused, lambda: [logits(model, tokens) for _ in range(10)])
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_starts_with_nothing_of_a_forward(copied):
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    expected = logits(model, tokens)
    with model.recurrence.at_depth(1), model.recurrence.recording() as steps:
        twin = copied(model)
        assert torch.equal(logits(twin, tokens), expected)
    assert not steps


def test_a_graft_within_the_forward_of_another_keeps_its_own_depth():
    inner, outer, tokens = hosts.grafted("llama"), hosts.grafted("llama", update=rd.plain), hosts.tokens()
    expected = logits(inner, tokens), logits(outer, tokens, num_steps=2)
    found = []
    outer.model.layers[2].register_forward_pre_hook(lambda *_: found.append(logits(inner, tokens)))
    assert torch.equal(logits(outer, tokens, num_steps=2), expected[1])
    assert all(torch.equal(one, expected[0]) for one in found)


@pytest.mark.compile
@torch.no_grad()
def test_threads_share_a_compiled_graft():
    torch.compiler.reset()
    model, tokens = hosts.grafted("llama"), hosts.tokens()
    expected = [logits(model, tokens, num_steps=n, use_cache=False) for n in (1, 3)]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for n in (1, 3):
        logits(compiled, tokens, num_steps=n, use_cache=False)

    def work(n):
        return [logits(compiled, tokens, num_steps=n, use_cache=False) for _ in range(5)]

    for found, one in zip(at_once(lambda: work(1), lambda: work(3)), expected, strict=True):
        for other in found:
            torch.testing.assert_close(other, one)
