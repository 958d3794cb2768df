"""Adapters of Hugging Face's libraries, of the extra `autopar[hf]`."""

from autopar.hf.accelerator import Accelerator
from autopar.hf.trainer import Trainer

__all__ = ["Accelerator", "Trainer"]
