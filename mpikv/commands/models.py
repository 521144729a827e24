"""Shapes of the trainable arrays of known networks, from their architecture.

Counted as torchvision counts them: convolution weights (filters, channels, k, k) without bias, gamma and beta of each
batch normalisation, weight and bias of the last layer; running means are no gradients and are left out. ResNet-18: 62
arrays, 11,689,512 values; ResNet-50: 161 arrays, 25,557,032 values. LeNet is that of examples/networks.py (two
convolutions with bias, two dense layers). The transformer is BERT-base's encoder of 12 layers, embeddings included.

Sources: He, Zhang, Ren and Sun, CVPR 2016, table 1 (with the stride, which changes no shape, where torchvision has
it); Devlin et al., NAACL 2019, section 3. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

Shape = tuple[int, ...]

CLASSES = 1000  # of ImageNet
STAGES = (64, 128, 256, 512)  # channels inside the blocks of the four stages of a residual network


def _convolution(filters: int, channels: int, k: int) -> Iterator[Shape]:
    """The shapes of a convolution with its batch normalisation."""
    yield (filters, channels, k, k)
    yield (filters,)
    yield (filters,)


def _basic_block(channels: int, inside: int, _expansion: int, *, projects: bool) -> Iterator[Shape]:
    yield from _convolution(inside, channels, 3)
    yield from _convolution(inside, inside, 3)
    if projects:
        yield from _convolution(inside, channels, 1)


def _bottleneck(channels: int, inside: int, expansion: int, *, projects: bool) -> Iterator[Shape]:
    yield from _convolution(inside, channels, 1)
    yield from _convolution(inside, inside, 3)
    yield from _convolution(inside * expansion, inside, 1)
    if projects:
        yield from _convolution(inside * expansion, channels, 1)


def _resnet(block: Callable[..., Iterator[Shape]], expansion: int, blocks: Shape) -> Iterator[Shape]:
    yield from _convolution(STAGES[0], 3, 7)
    channels = STAGES[0]
    for inside, number in zip(STAGES, blocks, strict=True):
        for place in range(number):
            # The first block of a stage projects its input where the shape changes.
            projects = place == 0 and (channels != inside * expansion or inside != STAGES[0])
            yield from block(channels, inside, expansion, projects=projects)
            channels = inside * expansion
    yield (CLASSES, channels)
    yield (CLASSES,)


def _lenet() -> Iterator[Shape]:
    yield from ((20, 1, 5, 5), (20,), (50, 20, 5, 5), (50,))
    yield from ((500, 800), (500,), (10, 500), (10,))


def _transformer(layers: int = 12, width: int = 768, words: int = 30522, places: int = 512) -> Iterator[Shape]:
    yield from ((words, width), (places, width), (2, width), (width,), (width,))
    for _ in range(layers):
        for _ in range(4):  # query, key, value, output
            yield (width, width)
            yield (width,)
        yield from ((width,), (width,))  # layer normalisation
        yield from ((4 * width, width), (4 * width,), (width, 4 * width), (width,))
        yield from ((width,), (width,))
    yield from ((width, width), (width,))  # pooler


_NETWORKS: Mapping[str, Callable[[], Iterator[Shape]]] = {
    "lenet": _lenet,
    "resnet18": lambda: _resnet(_basic_block, 1, (2, 2, 2, 2)),
    "resnet50": lambda: _resnet(_bottleneck, 4, (3, 4, 6, 3)),
    "transformer12": _transformer,
}
NAMES = tuple(_NETWORKS)


def shapes(name: str) -> tuple[Shape, ...]:
    """Return the shapes of a network's arrays in the order of the forward pass. ValueError for an unknown name."""
    if name not in _NETWORKS:
        raise ValueError(f"unknown network {name!r}; known are {', '.join(NAMES)}")
    return tuple(_NETWORKS[name]())
