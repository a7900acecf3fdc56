"""The passes, one file each; their order stands in `minivllm.compiler.pipeline`."""
