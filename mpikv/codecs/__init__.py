"""Gradient compression: how pushed values are encoded, and decoded where they are added.

`create({'type': '2bit', 'threshold': 0.5})` makes a codec from its name and its configuration; `names()` lists all
known names, and `register` adds a codec of your own. base.py defines what a codec is.
"""

from mpikv.codecs.base import Codec, State
from mpikv.codecs.registry import create, names, register

__all__ = ["Codec", "State", "create", "names", "register"]
