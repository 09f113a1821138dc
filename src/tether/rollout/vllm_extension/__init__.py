"""What a vLLM server loads beside vLLM itself: this folder is put on its PYTHONPATH."""
