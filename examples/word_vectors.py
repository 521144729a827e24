"""Word vectors: skip-gram with negative sampling, whose tables of vectors are pushed and pulled by rows.

    python examples/word_vectors.py --text FILE
    mpikv launch -n 4 -s 0 python examples/word_vectors.py --text FILE
    mpikv launch -n 4 -s 1 python examples/word_vectors.py --text FILE --dense
    mpikv launch -n 4 -s 0 python examples/word_vectors.py --text FILE --local 32

A word has two vectors, rows of two tables: one for the middle of a window, one for its surroundings. In a step each
worker takes one piece of the text, pulls the rows of its words, and pushes the gradients of these rows. Pieces that
do not divide among the workers are left out of an epoch. With `--dense` the tables are dense keys, of which whole
values are pulled and pushed: the same arithmetic with many more bytes. With `--local H` each worker keeps both tables
for itself and makes its steps alone; every H steps, and after an epoch, all that the workers have moved is added up, or
becomes what `--outer` makes of its mean.

Frequent words are left out at random, and each piece has its own negatives, which all its words share: as few rows as
a piece has words. Sources: T. Mikolov et al., "Distributed representations of words and phrases", NIPS 2013; S. Ji et
al., "Parallelizing word2vec in shared and distributed memory", 2016.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from image_files import ROOT
from usage import Parser

from mpikv import KVStore, LocalUpdates, MpikvError, Parameter, RowSparse, SplitSampler, Trainer, kv, optimizers
from mpikv.common.progress import Progress

BIBLE = ROOT / "data/bible.txt"
HOW_TO_GET_ONE = f"""no text. Give one by --text FILE, or, where Debian's packages are to be had:
    apt-get install bible-kjv && bible -f 'gen1:1-rev22:21' > {BIBLE}"""


def arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="plain text in UTF-8 (data/bible.txt of the clone)")
    add("--dense", action="store_true", help="dense keys in the place of row-sparse ones")
    add("--local", type=int, metavar="H", help="workers train by themselves, and exchange both tables every H steps")
    add("--outer", choices=("sum", "mean", "nesterov", "slowmo"), default="sum", help="with --local (sum)")
    add("--num-servers", type=int, help="how many of the ranks are servers (MPIKV_NUM_SERVERS)")
    add("--optimizer", choices=("sgd", "adagrad"), default="adagrad", help="(adagrad)")
    add("--lr", type=float, help="learning rate (adagrad 0.1, sgd 0.025)")
    add("--num-epochs", type=int, default=3, help="(3)")
    add("--dim", type=int, default=64, help="numbers in a vector (64)")
    add("--piece", type=int, default=128, help="words of one worker in a step (128)")
    add("--window", type=int, default=5, help="words on each side, at most (5)")
    add("--negatives", type=int, default=32, help="words drawn for each piece (32)")
    add("--min-count", type=int, default=5, help="rarer words are left out (5)")
    add("--sample", type=float, default=1e-3, help="words more frequent than this share are thinned out (0.001)")
    add("--seed", type=int, default=0, help="of all that is drawn (0)")
    options = parser.parse_args()
    parser.at_least_1(options, "num_epochs", "dim", "piece", "window", "negatives", "min_count", "local")
    if options.local and options.dense:
        parser.error("--dense: with --local the tables are dense anyway, and are exchanged whole")
    return options


@dataclass
class Text:
    """Words by their numbers: 0 is the most frequent one."""

    words: list[str]
    counts: np.ndarray
    numbers: np.ndarray  # of all words of the text, in its order

    def thinned(self, sample: float, random: np.random.Generator) -> np.ndarray:
        """Return the text with a word of the share f left there with the chance sqrt(sample / f)."""
        kept = np.sqrt(sample * self.counts.sum() / self.counts)
        return self.numbers[random.random(self.numbers.size) < kept[self.numbers]]


def read(file: Path | None, min_count: int) -> Text:
    """Read the words of a file: letters and apostrophes alone, in small letters."""
    file = file or BIBLE
    if not file.is_file():
        raise MpikvError(f"{file}: {HOW_TO_GET_ONE}")
    found = re.findall(r"\b[^\W\d_]+(?:'[^\W\d_]+)?\b", file.read_text(encoding="utf-8").lower())
    counts = {word: n for word, n in Counter(found).most_common() if n >= min_count}
    if len(counts) < 2:
        raise MpikvError(f"{file}: fewer than 2 words come {min_count} times (--min-count)")
    number = {word: i for i, word in enumerate(counts)}
    numbers = np.array([number[word] for word in found if word in number])
    return Text(list(counts), np.array(list(counts.values())), numbers)


class Table:
    """Vectors of all words in a store: a row-sparse key, or a dense one of which a step uses few rows."""

    def __init__(self, store: KVStore, key: str, first: np.ndarray, *, dense: bool) -> None:
        self.store, self.key, self.shape, self.dense = store, key, first.shape, dense
        store.init(key, first if dense else RowSparse.of(first))

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the vectors of these words, one for each, as all pushes so far have made them. Blocks."""
        if self.dense:
            whole: np.ndarray = self.store.pull(self.key)
            return whole[ids]
        rows = self.store.row_sparse_pull(self.key, row_ids=ids)
        return rows.values[np.searchsorted(rows.indices, ids)]

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Push the gradients of these words, which may repeat. Does not wait for other workers."""
        rows = RowSparse(ids, gradients, self.shape)
        self.store.push(self.key, rows.to_dense() if self.dense else rows)


class OwnTable:
    """The same for a worker that trains by itself: a parameter, and the gradients of a step's words."""

    def __init__(self, first: np.ndarray) -> None:
        self.parameter = Parameter(first.copy())

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the vectors of these words as this worker has them."""
        found: np.ndarray = self.parameter.data[ids]
        return found

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Let these be all gradients of the step."""
        self.parameter.zero_grad()
        np.add.at(self.parameter.grad, ids, gradients)


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)): the loss of a pair whose score is -x."""
    return np.logaddexp(0, x)


def loss_and_gradients(
    middle: np.ndarray, around: np.ndarray, negative: np.ndarray, near: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Return the sum of the losses of all pairs of a piece, and its gradients for the three arrays of vectors.

    middle, around: (words, dim), the two vectors of each word of the piece. negative: (negatives, dim). near: (words,
    words), 1 where a word is in the window of another one. A pair counts as much as 5 draws of a negative do.
    """
    share = 5 * near.sum(1, keepdims=True) / len(negative)
    scores, wrong = middle @ around.T, middle @ negative.T
    loss = (near * softplus(-scores)).sum() + (share * softplus(wrong)).sum()
    pull = -near / (1 + np.exp(scores))
    push = share / (1 + np.exp(-wrong))
    return float(loss), pull @ around + push @ negative, pull.T @ middle, push.T @ middle


@dataclass
class Training:
    """The tables, and what has been done so far."""

    store: KVStore
    options: argparse.Namespace
    text: Text
    steps: int = 0

    def __post_init__(self) -> None:
        n, dim = len(self.text.words), self.options.dim
        first = (np.random.default_rng(self.options.seed).random((n, dim), np.float32) - 0.5) / dim
        options, lr = self.options, self.options.lr or {"sgd": 0.025, "adagrad": 0.1}[self.options.optimizer]
        self.trainer: Trainer | None = None  # this worker's own, with --local
        if options.local:
            self.middle, self.around = OwnTable(first), OwnTable(np.zeros_like(first))
            params = {"middle": self.middle.parameter, "around": self.around.parameter}
            self.trainer = Trainer(params, options.optimizer, {"learning_rate": lr}, kvstore=None)
            # Most words are in the pieces of one worker alone: by the mean they would move a part of the way.
            summed = {"type": "mean", "learning_rate": float(self.store.num_workers)}
            outer = summed if options.outer == "sum" else options.outer
            self.local = LocalUpdates(params, self.store, every=options.local, outer=outer)
        else:
            self.middle = Table(self.store, "middle", first, dense=options.dense)
            self.around = Table(self.store, "around", np.zeros_like(first), dense=options.dense)
            self.store.set_optimizer(optimizers.create(options.optimizer, learning_rate=lr))
        self.chances = self.text.counts**0.75 / (self.text.counts**0.75).sum()

    def step(self, words: np.ndarray, random: np.random.Generator) -> tuple[float, float]:
        """One piece: the sum of its losses, and the number of its pairs."""
        negatives = random.choice(len(self.chances), self.options.negatives, p=self.chances)
        at = np.arange(words.size)
        windows = random.integers(1, self.options.window + 1, words.size)
        away = abs(at[:, None] - at)
        near = ((away > 0) & (away <= windows[:, None])).astype(np.float32)
        both = np.concatenate([words, negatives])
        middle, around = self.middle.rows(words), self.around.rows(both)
        loss, *gradients = loss_and_gradients(middle, around[: words.size], around[words.size :], near)
        self.middle.push(words, gradients[0])
        self.around.push(both, np.concatenate(gradients[1:]))
        if self.trainer is not None:
            self.trainer.step()
            self.local.step()
        self.steps += 1
        return loss, float(near.sum())

    def epoch(self, epoch: int) -> float:
        """All pieces of this worker; the mean loss of their pairs."""
        options, store = self.options, self.store
        text = self.text.thinned(options.sample, np.random.default_rng((options.seed, 1, epoch)))  # the same everywhere
        pieces = text[: text.size - text.size % options.piece].reshape(-1, options.piece)
        sampler = SplitSampler.for_store(len(pieces), store, seed=options.seed)
        sampler.set_epoch(epoch)
        if not len(sampler):
            raise MpikvError(f"the text has {len(pieces)} pieces for {store.num_workers} workers; see --piece")
        random = np.random.default_rng((options.seed, 2, epoch, store.rank))
        sums, title = np.zeros(2), f"epoch {epoch + 1}/{options.num_epochs}"
        with Progress(title, len(sampler), "steps", shown=store.rank == 0) as progress:
            for piece in sampler.indices():
                sums += self.step(pieces[piece], random)
                progress.update(1, loss=sums[0] / max(sums[1], 1))
        if self.trainer is not None:
            self.local.exchange()
        return float(sums[0] / max(sums[1], 1))

    def print_nearest(self) -> None:
        """Print the words next to a few long and frequent ones, by the angle between their vectors."""
        vectors = self.middle.rows(np.arange(len(self.text.words)))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        long = [i for i, word in enumerate(self.text.words[50:], 50) if len(word) > 3]
        for i in long[:8]:
            nearest = np.argsort(-(vectors @ vectors[i]))[1:6]
            print(f"{self.text.words[i]}: {' '.join(self.text.words[j] for j in nearest)}")


def main() -> None:
    options = arguments()
    with kv.create("dist_sync", num_servers=options.num_servers) as store:  # a server rank stays in here
        text = read(options.text, options.min_count)
        if store.rank == 0:
            print(f"text: {text.numbers.size} words, {len(text.words)} different ones", flush=True)
        training, start_s = Training(store, options, text), time.perf_counter()
        before = store.stats()["bytes_sent"]
        for epoch in range(options.num_epochs):
            loss = training.epoch(epoch)
            if store.rank == 0:
                print(f"epoch {epoch + 1}/{options.num_epochs}: loss {loss:.4f}", flush=True)
        sent = store.stats()["bytes_sent"] - before
        tables = 2 * len(text.words) * options.dim * 4 * training.steps  # the bytes of both, in each step
        if store.rank == 0:
            training.print_nearest()
            print(f"worker 0 has sent {sent / 1e6:.2f} MB; the whole tables in each step are {tables / 1e6:.2f} MB")
            what = f"loss {loss:.4f} after {training.steps} steps in {time.perf_counter() - start_s:.1f} s"
            print(f"{what}, worker 0 has sent {sent / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
