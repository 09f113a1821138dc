"""The exact pass of `model.numerics: exact`: what a token gets does not depend on the tokens that it is run with."""
