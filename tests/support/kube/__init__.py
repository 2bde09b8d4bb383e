"""A Kubernetes for tests: the real control plane where it was built, and a stand-in for the kubelet."""
