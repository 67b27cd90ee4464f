"""The private names of torch, Lightning and Hydra that we use, each with a reason.

Elsewhere only our strategies use private names, namely of the classes that they inherit from; these are listed in
`lightning_commopt.compat.lightning`.

Tested with torch 2.6 to 2.15, Lightning 2.5 to 2.6.6 and Hydra 1.3.2 to 1.4.0rc3.
"""
