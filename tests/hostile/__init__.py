"""Hostile inputs for every command: made from a seed, run in forked processes, judged by one oracle.

    .venv/bin/python tests/hostile/run.py --seed 1            # all of them, with a table
    .venv/bin/python tests/hostile/run.py --case recipes/     # those whose names hold a text
    .venv/bin/pytest -m hostile tests/hostile                 # the same under pytest

| file | what it is |
|---|---|
| `case.py` | a case, and the folder it is played in |
| `bases.py` | sound checkpoints, results and left-overs, made once, that mutations break |
| `scenes.py` | every command, with the base it is given and the folder that is broken |
| `breaking/` | mutations, one subject a file |
| `catalogue.py` | mutations times scenes: the cases of a seed, and a bounded sample of them |
| `zygote.py`, `play.py` | a process that forks one child a case, and who talks to it |
| `trees.py` | all that lies in a folder, before and after |
| `oracle.py` | what is wrong with what a command did |
"""
