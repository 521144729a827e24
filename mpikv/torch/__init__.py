"""PyTorch on MPI. Importing this registers the backend "mpikv" of `torch.distributed`, and initialises no MPI.

import mpikv.torch
torch.distributed.init_process_group("mpikv")
"""

from mpikv.torch import backend

backend.register()
