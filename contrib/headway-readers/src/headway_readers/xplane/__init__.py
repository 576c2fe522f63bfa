"""XSpace (xplane.pb), which TensorFlow and JAX write alike; ``profile`` is what its JSON form is read into as well."""
