"""The OpenAPI document of the HTTP side: what is asked, what is answered, how it is refused."""
