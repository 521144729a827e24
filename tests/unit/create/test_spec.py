"""Names of stores."""

from __future__ import annotations

import pytest

from mpikv import kv
from mpikv.create.spec import NAMES, StoreSpec, parse


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_any_case(name):
    spec = parse(name)
    assert parse(name.upper()) == parse(name.title()) == spec
    assert spec.distributed == name.startswith("dist")
    assert spec.synchronous == ("async" not in name)
    assert spec.on_device == ("device" in name or name == "nccl")


def test_aliases():
    assert parse("dist") == parse("dist_sync") == StoreSpec(distributed=True, synchronous=True, on_device=False)
    assert parse("dist_sync_device") == parse("dist_device_sync")
    assert parse("dist_async_device") == parse("dist_device_async")
    assert parse("local") == parse("local_update_cpu") == parse("local_allreduce_cpu")
    assert parse("device") == parse("local_allreduce_device") == parse("nccl")


@pytest.mark.parametrize("name", ["", "dist_", "dist-sync", " local", "localhost", "distributed", "p3", "horovod"])
def test_any_other_name_lists_the_valid_ones(name):
    for call in (parse, kv.create):
        with pytest.raises(ValueError, match="unknown type of store") as caught:
            call(name)
        assert repr(name) in str(caught.value)
        for valid in NAMES:
            assert valid in str(caught.value)


def test_a_near_miss_and_other_types():
    with pytest.raises(ValueError, match="Did you mean 'dist_async'"):
        parse("dist_asinc")
    for name in (None, 3, b"local", ["local"]):
        with pytest.raises(TypeError, match="str such as 'dist_sync'"):
            kv.create(name)
