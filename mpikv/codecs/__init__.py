"""Gradient compression: how pushed values are encoded, and decoded where they are added.

`create({'type': '2bit', 'threshold': 0.5})` makes a codec from its name and its configuration; `names()` lists all
known names, and `register` adds a codec of your own. base.py defines what a codec is.
"""

from __future__ import annotations

from mpikv.codecs.base import Codec, State
from mpikv.codecs.cast import BFloat16, Float16
from mpikv.codecs.error_feedback import ErrorFeedback
from mpikv.codecs.identity import Identity
from mpikv.codecs.int8 import Int8
from mpikv.codecs.onebit import OneBit
from mpikv.codecs.powersgd import PowerSGD
from mpikv.codecs.randomk import RandomK
from mpikv.codecs.registry import create, names, register
from mpikv.codecs.topk import TopK
from mpikv.codecs.twobit import TwoBit

__all__ = [
    "BFloat16",
    "Codec",
    "ErrorFeedback",
    "Float16",
    "Identity",
    "Int8",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "State",
    "TopK",
    "TwoBit",
    "create",
    "names",
    "register",
]
