"""`tether serve`: a model behind an OpenAI-compatible endpoint."""
