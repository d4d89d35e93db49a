"""Draft heads: small models that draft from a policy's hidden states.

`offline_training` trains an EAGLE-3 head on recorded texts. `online` trains a head while its policy
is trained. `writing` reads and writes heads with torch; `checkpoint` reads their folders without
it.
"""
