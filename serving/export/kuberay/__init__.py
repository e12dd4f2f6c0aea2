"""The lab as manifests for Kubernetes: what `tandem export kuberay` writes."""
