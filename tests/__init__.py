"""A package, so that pytest leaves this folder off the path, where tests/vllm would be `vllm`."""
