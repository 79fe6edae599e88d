"""Sessions: saved and resumed in new processes, killed writers, forks, and memory given back."""

import copy
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvtier
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.listing import describe
from tests.model_cases import FAMILIES, expected, generate, plain, prompt, qwen2, require_varied

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")
ROOT = Path(__file__).parent.parent
TURN_TOKENS = (37, 1, 53, 129, 7, 64, 15, 301, 2, 91, 16, 33)
ANSWER_TOKENS = (13, 21, 5, 16, 32, 1, 9, 40, 17, 3, 11, 25)


class Worker:
    """A process that forks for every command."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker ended"
        message: dict[str, Any] = json.loads(line)
        return message


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    command = [sys.executable, "-m", "tests.model_worker"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Worker(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_chat_of_twelve_turns_each_in_a_new_process(
    family: str, worker: Worker, tmp_path: Path
) -> None:
    """The reference is one DynamicCache that reads the same stream."""
    model = plain(family)
    reference_cache = DynamicCache(config=model.config)
    stream = torch.zeros(1, 0, dtype=torch.long)
    held = 0
    for number, (asked, answered) in enumerate(zip(TURN_TOKENS, ANSWER_TOKENS, strict=True)):
        stream = torch.cat([stream, prompt(number, asked)], 1)
        command: dict[str, Any] = {"do": "turn", "family": family, "path": str(tmp_path / "kv")}
        command |= {"stream": stream[0].tolist(), "new": answered, "name": "chat"}
        worker.send(command)
        reply = worker.receive()
        reference = generate(model, stream, reference_cache, answered)
        assert reply["output"] == reference[0].tolist(), f"turn {number}"
        assert reply["restored"] == held
        held = reference.shape[1] - 1
        assert reply["saved"] == held
        stream = reference
    require_varied(stream)
    described = describe(tmp_path / "kv")
    assert [(each.name, each.tokens) for each in described.names] == [("chat", held)]
    assert sum(each.tokens for each in described.segments) == held, "a token was stored twice"


@pytest.mark.parametrize("family", ["gemma3"])
def test_a_writer_killed_while_it_goes_on(family: str, worker: Worker, tmp_path: Path) -> None:
    """What was saved is there; what comes after it is a longer match or a miss, never other KV."""
    ids = prompt(3, 150)
    command = {"do": "write", "family": family, "path": str(tmp_path / "kv")}
    worker.send({**command, "stream": ids[0].tolist(), "new": 30})
    saved = worker.receive()
    assert saved["saved"] == 179
    while (message := worker.receive())["held"] < 900:
        pass
    stream = torch.tensor([message["output"]])
    os.kill(saved["pid"], signal.SIGKILL)
    while "status" not in (message := worker.receive()):
        pass
    assert os.WTERMSIG(message["status"]) == signal.SIGKILL
    model = FAMILIES[family]()
    with kvtier.open(tmp_path / "kv", model=model) as store:
        assert [(each.name, each.token_count) for each in store.names()] == [("before", 179)]
        cache = TieredCache(store, stream)
        assert cache.restored_tokens == 179 + 512, "a Segment was complete after what was saved"
        output = generate(model, stream, cache, 20)
        assert torch.equal(output, expected(family, stream, 20))
        cache = TieredCache(store, ids)
        assert cache.restored_tokens == 149
        assert torch.equal(generate(model, ids, cache, 30), expected(family, ids, 30))


@pytest.mark.parametrize("copier", [TieredCache.fork, copy.deepcopy])
@pytest.mark.parametrize("length", [40, 100, 620])
def test_eight_forks_of_one_prefix(copier: Any, length: int, tmp_path: Path) -> None:
    """Short Tails are copied, long ones shared; each fork goes its own way, and so does the
    parent."""
    model = qwen2()
    ids = prompt(8, length)
    tails = [prompt(100 + each, 5 + each) for each in range(9)]
    streams = [torch.cat([ids, tail], 1) for tail in tails]
    with kvtier.open(tmp_path / "kv", model=model, region="16MiB", hot="4MiB") as store:
        parent = TieredCache(store, ids)
        with torch.no_grad():
            model(ids, cache=parent)
        forks = [copier(parent) for _ in range(8)]
        for fork, stream in zip(forks[:4], streams[:4], strict=True):
            assert torch.equal(generate(model, stream, fork, 6), expected("qwen2", stream, 6))
        output = generate(model, streams[8], parent, 6)
        assert torch.equal(output, expected("qwen2", streams[8], 6))
        parent.save("parent", tokens=output)
        for fork, stream in zip(forks[4:], streams[4:8], strict=True):
            assert fork.get_seq_length() == length
            assert torch.equal(generate(model, stream, fork, 6), expected("qwen2", stream, 6))
        for number, fork in enumerate(forks):
            assert fork.save(f"fork {number}") == length + 5 + number + 5
        assert len(store.names()) == 9
        tokens = sum(each.tokens for each in describe(tmp_path / "kv").segments)
        own = sum(5 + each + 5 for each in range(9))
        if length >= 100:
            assert tokens <= length + own, "the prefix is stored once"


def test_save_twice_and_go_on(tmp_path: Path) -> None:
    model = qwen2()
    ids = prompt(9, 45)
    reference = expected("qwen2", ids, 60)
    with kvtier.open(tmp_path / "kv", model=model, region="8MiB", hot="4MiB") as store:
        cache = TieredCache(store, ids)
        output = generate(model, ids, cache, 20)
        assert cache.save("a", tokens=output) == 64
        written = store.stats().kv_bytes_stored
        assert cache.save("a", tokens=output) == cache.save("b") == 64
        assert store.stats().kv_bytes_stored == written
        output = generate(model, output, cache, 40)
        assert torch.equal(output, reference)
        assert cache.save("a") == 104
        assert {each.name: each.token_count for each in store.names()} == {"a": 104, "b": 64}
        assert store.lookup(reference[0]) == 104
    with kvtier.open(tmp_path / "kv", model=model) as store:
        cache = TieredCache(store, reference)
        assert cache.restored_tokens == 104
        longer = torch.cat([reference, prompt(1, 3)], 1)
        output = generate(model, longer, TieredCache(store, longer), 9)
        assert torch.equal(output, expected("qwen2", longer, 9))


@pytest.mark.parametrize("saved", [False, True])
def test_a_cache_that_was_dropped_gives_its_frames_back(saved: bool, tmp_path: Path) -> None:
    model = qwen2()
    ids = prompt(10, 200)
    with kvtier.open(tmp_path / "kv", model=model, region="8MiB", hot="4MiB") as store:
        clean = store.stats().hot_bytes
        assert clean == 0
        for _ in range(5):
            cache = TieredCache(store, ids)
            output = generate(model, ids, cache, 5)
            if saved:
                cache.save("a", tokens=output)
            held = store.stats().hot_bytes
            assert held > 0
            del cache
            gc.collect()
        # What was saved may stay as a clean copy; a dirty one is given back.
        assert store.stats().hot_bytes == (held if saved else clean)
        with TieredCache(store, ids) as cache:
            generate(model, ids, cache, 5)
        assert store.stats().hot_bytes <= (held if saved else clean)


def test_a_cache_outlives_its_store(tmp_path: Path) -> None:
    model = qwen2()
    ids = prompt(11, 30)
    with kvtier.open(tmp_path / "kv", model=model, region="8MiB", hot="4MiB") as store:
        cache = TieredCache(store, ids)
        generate(model, ids, cache, 5)
    cache.close()
    with pytest.raises(kvtier.KvtierError, match="while it is open"):
        generate(model, ids, cache, 5)
    with pytest.raises(kvtier.KvtierError, match="closed"):
        TieredCache(store, ids)
