"""Graph + Plan -> the lowered program: functions of lines over named variables.

The emitter prints these lines, the simulator plays them, and whatever counts calls or collectives
of a plan reads them, so that a price and the program that it is for cannot disagree.

| to see | read |
|---|---|
| the lines that there are | `lines.py` |
| how a graph becomes lines | `program.py` (functions), `function.py` (one function) |
| what variables are called | `variables.py` |
| how `p` names parameters | `parameter_keys.py` |
| how lines are printed and parsed | `lowered_text.py` |
| the layouts of a plan, by node | `planned_layouts.py` |
"""
