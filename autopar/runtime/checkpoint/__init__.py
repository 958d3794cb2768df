"""Checkpoints: the state of a program in a folder that any other plan can read.

checkpoint.json                contents and their places; its rename publishes the checkpoint
save-TOKEN/rank_0.safetensors  the file of rank 0, and so on; every save has its own folder

Tensors have the names of the model's state_dict, whatever a program fuses or splits: `model.NAME`,
`optimizer.NAME.exp_avg`, and `buffer.NAME` for buffers that are not in a state_dict. Each is stored
as boxes of the whole tensor. torch.distributed.checkpoint plans which rank writes and reads what;
its own format contains a pickle, which can execute code, so the folder uses JSON and safetensors
instead.

| to see | read |
|---|---|
| the part of a tensor on this rank | boxes.py |
| the state of a program that is saved | contents.py |
| the folder: published as a whole, read consistently | publish.py, `autopar/files/atomic.py` |
| the contents of a checkpoint, and how they are checked | index.py |
| values as JSON | values.py |
| torch.distributed.checkpoint's plans, files and errors | plans.py, safetensors_files.py, dcp.py |
| saving and loading | checkpoints.py, saving.py; without processes plain.py |
"""
