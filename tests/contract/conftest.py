"""No GPU is used here, also where there is one: what is compared is what CuPy offers, and where it gives up."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CuPy is imported
