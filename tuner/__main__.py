"""`python -m tuner --data-dir DIR` is `layout-tuner driver --data-dir DIR`."""

from tuner.driver.commands import driver

if __name__ == "__main__":
    driver(prog_name="layout-tuner driver")
