#include "cli/tool.hpp"

int main(int argc, char** argv) { return kvevict::tool::run(argc, argv, kvevict::tool::standard_parts()); }
