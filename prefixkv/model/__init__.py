"""The only folder that imports transformers: loading, the attention hook, one packed forward, sampling."""
