"""Where models come from: the embedded models, a folder, a GGUF file, and checks before anything is read."""
