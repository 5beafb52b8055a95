"""Classes of the runtimes as their own code was seen to build and to load them: a table a class and
version (`<runtime>-<version>/<Architecture>.json`), made by a command, and what reads them."""
