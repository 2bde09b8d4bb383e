"""On Kubernetes: the operator here, the Helm chart beside it."""
