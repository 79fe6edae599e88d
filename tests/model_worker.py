"""Turns of a chat in processes of their own, for tests: one JSON command a line, one answer each.

Run as `python -m tests.model_worker`. It imports what is slow to import once and forks for every
command, before anything is opened; the child builds its model and opens the store anew.
"""

import json
import os
import sys
from itertools import count
from typing import Any

import torch

import kvtier
from kvtier.tiering.adapters.huggingface import TieredCache
from tests.model_cases import FAMILIES, generate, prompt


def turn(command: dict[str, Any]) -> dict[str, Any]:
    """Resume, answer, save."""
    ids = torch.tensor([command["stream"]])
    model = FAMILIES[command["family"]]()
    with kvtier.open(command["path"], model=model, region="16MiB", hot="1MiB") as store:
        cache = TieredCache(store, ids, plan="load")
        output = generate(model, ids, cache, command["new"])
        saved = cache.save(command["name"], tokens=output)
        segments = store.stats().segments
    return {
        "restored": cache.restored_tokens,
        "output": output[0].tolist(),
        "saved": saved,
        "segments": segments,
    }


def write_until_killed(command: dict[str, Any]) -> None:
    """Save, say so, then go on writing without end."""
    ids = torch.tensor([command["stream"]])
    model = FAMILIES[command["family"]]()
    store = kvtier.open(command["path"], model=model, region="64MiB", hot="1MiB")
    cache = TieredCache(store, ids, plan="load")
    output = generate(model, ids, cache, command["new"])
    answer({"pid": os.getpid(), "saved": cache.save("before", tokens=output)})
    for turn_number in count(1000):
        output = torch.cat([output, prompt(turn_number, 60)], 1)
        output = generate(model, output, cache, 4)
        answer({"held": cache.get_seq_length(), "output": output[0].tolist()})


def answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        command = json.loads(line)
        child = os.fork()
        if child == 0:
            if command["do"] == "turn":
                answer(turn(command))
            else:
                write_until_killed(command)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            answer({"status": status})


if __name__ == "__main__":
    main()
