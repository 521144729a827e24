"""SplitSampler in PyTorch's DataLoader, with processes that load and that stay over the epochs."""

from __future__ import annotations

import frameworks
import pytest

torch_data = frameworks.need("torch.utils.data")

from mpikv.data import SplitSampler  # noqa: E402

N, PARTS, EPOCHS = 37, 3, 3


def _order(part: int, epoch: int) -> list[int]:
    sampler = SplitSampler(N, PARTS, part, last="uneven")
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_every_epoch_has_its_order(options: dict[str, object]) -> None:
    for part in range(PARTS):
        sampler = SplitSampler(N, PARTS, part, last="uneven")
        loader = torch_data.DataLoader(range(1000, 1000 + N), batch_size=5, sampler=sampler, **options)
        assert len(loader) == -(-len(sampler) // 5)
        for epoch in (0, 1, 1, 0):
            sampler.set_epoch(epoch)
            found = [int(i) - 1000 for batch in loader for i in batch]
            assert found == _order(part, epoch)
    assert _order(0, 0) != _order(0, 1)
