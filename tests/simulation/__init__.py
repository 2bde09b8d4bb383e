"""The whole cluster in one process under virtual time: a seed decides everything that happens."""
