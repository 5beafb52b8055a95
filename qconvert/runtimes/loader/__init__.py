"""A runtime's own loader, run on a CPU by the interpreter that has the runtime, and asked from here."""
