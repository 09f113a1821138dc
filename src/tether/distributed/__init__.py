"""Several processes that train one model together; the only package that uses torch.distributed."""
