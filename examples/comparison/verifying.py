def verify(*a, **k):
    raise NotImplementedError
