"""What a training step is made of; `egeria_lab.session.Session` puts it together."""
