"""Where models come from: embedded models, folders and GGUF files, and the checks before anything is read."""
