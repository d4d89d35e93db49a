"""Draft heads: small models that draft from a policy's hidden states."""
