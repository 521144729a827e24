"""A worker of an asynchronous store for tests of deaths: `continued_pushes.py SEED FOLDER VICTIM@OP[+MS],...`.

Every worker makes the random operations of the seed (tests/pushes_apart.py). Victims are those of continued_program.py.
Each worker writes what it has pushed and seen into FOLDER/N, N its number at the start.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
import time
from pathlib import Path

from continued_program import arm, die, victim_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from pushes_apart import OPS, PUSHES, Op, Worker

from mpikv import kv
from mpikv.common.files import replacing

OPERATIONS = PUSHES // 2  # one may push twice


def main(seed: str, folder: str, given: str) -> None:
    arm(given)
    dice = random.Random(int(seed))
    program = [Op(dice.choice(OPS), dice.randrange(10)) for _ in range(OPERATIONS)]
    victims = [victim_of(one) for one in given.split(",") if one and not one.startswith("r")]
    with kv.create("dist_async") as store:
        number = store.session.number
        worker = Worker(store, folder, store.session.at_start)
        worker.begin()
        for worker.at, op in enumerate(program):
            for who, when, after_s in victims:
                if (who, when) == (number, worker.at):
                    threading.Thread(target=die, args=(after_s,), daemon=True).start()
            worker.pause(0)
            begun_s, generation = time.perf_counter(), store.generation
            worker.run(op)
            if store.generation > generation and store.rank == 0:
                print(f"went on after {time.perf_counter() - begun_s:.3f} s", flush=True)
        ended = worker.end()
    with replacing(str(Path(folder, str(number)))) as file:  # it may be killed meanwhile
        file.write(pickle.dumps(tuple(ended)))


if __name__ == "__main__":
    main(*sys.argv[1:])
