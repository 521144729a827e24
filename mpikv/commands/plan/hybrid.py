"""A step of a synchronous store with servers whose keys are divided between the workers and the servers.

Each key is cut where the store cuts it (placement/cut.py). The parts are what they are in a store without servers and
in one whose servers take all, and are under way at the same time: the step takes as long as the slower of the two, but
no less than the links and the core of a worker, which both use, are busy for both.
"""

from __future__ import annotations

import numpy as np

from mpikv.codecs.compression import wire_of
from mpikv.commands.plan import allreduce, servers
from mpikv.commands.plan.outcome import PlannedStep
from mpikv.commands.plan.workload import DTYPE, StepSettings, Workload
from mpikv.placement.costs import Costs, Link
from mpikv.placement.cut import cut_of
from mpikv.placement.keys import KeyInfo


def cuts_of(workload: Workload, workers: int, link: Link, settings: StepSettings) -> list[int]:
    """Return how many elements of each key go by the workers."""
    members, found = servers.members_of(workers, link, settings), []
    for number, shape in enumerate(workload.shapes):
        info = KeyInfo(number, number, shape, np.dtype(DTYPE), settings.compression.for_shape(shape).text)
        found.append(cut_of(members, info, wire_of(info), whole=False))
    return found


def predict(workload: Workload, workers: int, link: Link, costs: Costs, settings: StepSettings) -> PlannedStep:
    """Predict one step."""
    cuts = cuts_of(workload, workers, link, settings)
    if not any(cuts):
        return servers.predict(workload, workers, link, costs, settings)
    keys = zip(cuts, workload.sizes, workload.shapes, strict=True)
    shapes = tuple(shape if cut == size else (cut,) for cut, size, shape in keys)
    first = allreduce.predict(Workload(workload.name, shapes), workers, link, costs, settings)
    rest = servers.predict(workload, workers, link, costs, settings)
    of_workers = {"link out": "worker link out", "link in": "worker link in", "core": "worker core"}
    busy_s = dict(rest.busy_s)
    for what, its_name in of_workers.items():
        busy_s[its_name] = busy_s.get(its_name, 0.0) + first.busy_s[what]
    overlapped_s = None
    if first.overlapped_s is not None and rest.overlapped_s is not None:
        overlapped_s = max(first.overlapped_s, rest.overlapped_s, *busy_s.values())
    return PlannedStep(
        f"servers and {first.mode}, sync",
        max(first.exchange_s, rest.exchange_s, *busy_s.values()),
        overlapped_s,
        first.messages + rest.messages,
        first.sent_bytes + rest.sent_bytes,
        busy_s,
    )
