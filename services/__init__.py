"""The services of Rollwise, one package each, and what they share (`services.common`)."""
