"""Draft heads: small models that draft from a policy's hidden states, trained here and read here.

`checkpoint` needs no torch and says what a folder holds; the other modules train EAGLE-3 heads.
"""
