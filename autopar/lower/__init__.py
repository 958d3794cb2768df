"""Lowers a graph and a plan to a program: functions of lines over named variables.

The emitter prints these lines, the simulator runs them, and all code that counts a plan's calls or
collectives reads them, so that a price and its program cannot disagree.

| subject | file |
|---|---|
| kinds of lines | `lines.py` |
| from a graph to lines | `program.py` (functions), `function.py` (one function) |
| names of variables | `variables.py` |
| names of parameters in `p` | `parameter_keys.py` |
| printing and parsing of lines | `lowered_text.py` |
| layouts of a plan, by node | `planned_layouts.py` |
"""
