"""Adapters of Hugging Face's libraries, of the extra `autopar[hf]`."""

from autopar.hf.trainer import Trainer

__all__ = ["Trainer"]
