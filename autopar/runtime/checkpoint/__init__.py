"""Checkpoints: what a program needs to go on, in a folder that any other plan can read.

checkpoint.json                what is there, and where; its rename makes all of it count
save-TOKEN/rank_0.safetensors  what rank 0 wrote, and so on; every save has a folder of its own

Tensors have the names of the model's state_dict, whatever a program fuses or splits: `model.NAME`,
`optimizer.NAME.exp_avg`, and `buffer.NAME` for buffers that are no part of a state_dict. Each is
stored as boxes of the whole tensor. torch.distributed.checkpoint plans who writes and who reads
what; its own files hold a pickle, which executes what it is told, so the folder's format is JSON
and safetensors instead.

| to see | read |
|---|---|
| which part of a tensor this rank holds | boxes.py |
| what is saved of a program | contents.py |
| the folder: published whole or not at all | publish.py, `autopar/files/atomic.py` |
| what a checkpoint says that it holds, and what is believed of it | index.py |
| values as JSON | values.py |
| torch.distributed.checkpoint's plans, files and errors | plans.py, safetensors_files.py, dcp.py |
| saving and loading | checkpoints.py, saving.py; without processes plain.py |
"""
