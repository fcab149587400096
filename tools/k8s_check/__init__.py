"""Checks k8s/ offline: what Kubernetes, KubeRay, Ray Serve and Switchyard would say, before any of them is asked."""
