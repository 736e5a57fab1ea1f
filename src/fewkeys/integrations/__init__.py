"""Where models live. The rest of the package takes tensors only; each file here knows one model library."""
